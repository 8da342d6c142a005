// Device nodes (vendors' container toolkits and device plugins use the same names) and PCI vendor
// ids.
#include "control/hardware.hpp"

#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <fstream>

namespace rm::control {
namespace {

namespace fs = std::filesystem;

struct Vendor {
  DeviceKind kind;
  const char* name;
  const char* folder;  // of the nodes
  const char* prefix;  // of a node's name, before its number
  const char* suffix;  // and behind it
  const char* pci_vendor;
  const char* pci_class;  // prefix of the class, so that a maker's bridges do not count
  const char* packages;   // the vendor's own
  const char* packages_from;
  const char* refused_prefix = nullptr;  // of /dev nodes of a device of theirs that is not used
  const char* refused = nullptr;
};
// 0x0300 VGA and 0x0302 3D controllers; 0x12 processing accelerators.
constexpr Vendor kVendors[] = {
    {DeviceKind::kCuda, "NVIDIA", "dev", "nvidia", "", "0x10de", "0x03", "nvidia-cublas", ""},
    {DeviceKind::kRbln, "Rebellions", "dev", "rbln", "", "0x1eff", "0x",
     "optimum-rbln rebel-compiler", "rebel-compiler comes from Rebellions' own package index"},
    {DeviceKind::kFuriosa, "FuriosaAI", "dev/rngd", "npu", "mgmt", "0x1ed2", "0x",
     "furiosa-torch", "", "npu",
     "a Warboy, whose compiler is another one (furiosa-sdk: ONNX files, int8): it is not supported"}};

/// The number between prefix and suffix, or -1.
int node_number(std::string_view name, std::string_view prefix, std::string_view suffix) {
  if (!name.starts_with(prefix) || !name.ends_with(suffix)) return -1;
  name.remove_prefix(prefix.size());
  name.remove_suffix(std::min(suffix.size(), name.size()));
  int number = -1;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
  return error == std::errc() && end == name.data() + name.size() && number >= 0 ? number : -1;
}

std::string first_line(const fs::path& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

size_t count_pci(const fs::path& root, const Vendor& vendor) {
  size_t count = 0;
  std::error_code error;  // no sysfs: nothing found
  for (const auto& entry : fs::directory_iterator(root / "sys/bus/pci/devices", error)) {
    if (first_line(entry.path() / "vendor") == vendor.pci_vendor &&
        first_line(entry.path() / "class").starts_with(vendor.pci_class)) {
      ++count;
    }
  }
  return count;
}

}  // namespace

std::vector<VendorHardware> detect_hardware(const fs::path& root) {
  std::vector<VendorHardware> found;
  for (const Vendor& vendor : kVendors) {
    VendorHardware hardware;
    hardware.kind = vendor.kind;
    hardware.vendor = vendor.name;
    hardware.packages = vendor.packages;
    hardware.packages_from = vendor.packages_from;
    hardware.looked_for = std::string("/") + vendor.folder + "/" + vendor.prefix + "<number>" +
                          vendor.suffix + ", or vendor " + vendor.pci_vendor + " on the PCI bus";
    std::vector<std::pair<int, std::string>> numbered;
    std::error_code error;  // no such folder: no such device
    for (const auto& entry : fs::directory_iterator(root / vendor.folder, error)) {
      const std::string name = entry.path().filename().string();
      const int number = node_number(name, vendor.prefix, vendor.suffix);
      if (number >= 0) numbered.emplace_back(number, name);
    }
    std::sort(numbered.begin(), numbered.end());
    for (const auto& [number, name] : numbered) {
      const std::string node = std::string("/") + vendor.folder + "/" + name;
      hardware.nodes.push_back(node);
      if (access((root / vendor.folder / name).c_str(), R_OK | W_OK) != 0) {
        hardware.unreadable.push_back(node);
      }
    }
    if (vendor.refused_prefix != nullptr) {
      for (const auto& entry : fs::directory_iterator(root / "dev", error)) {
        const std::string name = entry.path().filename().string();
        if (node_number(name, vendor.refused_prefix, "") < 0) continue;
        hardware.refused = "/dev/" + name + ", " + vendor.refused;
      }
    }
    hardware.pci_functions = count_pci(root, vendor);
    found.push_back(std::move(hardware));
  }
  return found;
}

}  // namespace rm::control
