// What accelerators the machine has, seen without any vendor software: device nodes and PCI ids.
// Every path is below a root prefix, so tests show it a made-up machine.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "control/device.hpp"

namespace rm::control {

struct VendorHardware {
  DeviceKind kind = DeviceKind::kCuda;
  std::string vendor;                   ///< "NVIDIA"
  std::string looked_for;               ///< "/dev/nvidia<number>, or vendor 0x10de on the PCI bus"
  std::vector<std::string> nodes;       ///< "/dev/nvidia0", by index; without the root prefix
  std::vector<std::string> unreadable;  ///< nodes this user may not open
  std::string packages;                 ///< what pip installs for it: "optimum-rbln rebel-compiler"
  std::string packages_from;            ///< where pip finds those PyPI has not; may be empty
  std::string refused;  ///< another device of the maker that is here, and why it is not used
  size_t pci_functions = 0;             ///< present on the bus, with or without a driver
};

/// One row a vendor, found or not: CUDA, Rebellions, FuriosaAI.
std::vector<VendorHardware> detect_hardware(const std::filesystem::path& root = "/");

}  // namespace rm::control
