// The routing decision on made-up machines: a root folder for the hardware, a table of backends.
#include <doctest/doctest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>

#include "base/error.hpp"
#include "control/device_flow.hpp"

using namespace rm::control;
namespace fs = std::filesystem;

namespace {

/// A root folder with device nodes and PCI functions, removed at the end.
class FakeRoot {
 public:
  FakeRoot() {
    std::string path = (fs::temp_directory_path() / "rm_rootXXXXXX").string();
    path_ = mkdtemp(path.data());
  }
  ~FakeRoot() { fs::remove_all(path_); }
  FakeRoot& node(const std::string& path) { return write(path, ""); }
  FakeRoot& pci(const std::string& vendor, const std::string& pci_class) {
    const std::string folder =
        "sys/bus/pci/devices/0000:0" + std::to_string(++functions_) + ":00.0/";
    return write(folder + "vendor", vendor + "\n").write(folder + "class", pci_class + "\n");
  }
  const fs::path& path() const { return path_; }

 private:
  FakeRoot& write(const std::string& path, const std::string& content) {
    fs::create_directories((path_ / path).parent_path());
    std::ofstream(path_ / path) << content;
    return *this;
  }
  fs::path path_;
  int functions_ = 0;
};

Machine machine(const FakeRoot& root, std::vector<BackendStatus> backends) {
  Machine out;
  out.hardware = detect_hardware(root.path());
  out.backends = std::move(backends);
  return out;
}

const BackendStatus kCpuUp{"cpu", 100, 1, ""}, kCudaUp{"cuda", 200, 2, ""},
    kRblnUp{"rbln", 300, 2, ""}, kFuriosaUp{"furiosa", 300, 1, ""}, kSimUp{"sim", 50, 1, ""},
    kTorchUp{"torch", 1, 1, ""};

Resolution resolve(const Machine& m, const char* device, const char* policy = "warn") {
  return DeviceFlowController(m).resolve(parse_device(device), FallbackPolicy::parse(policy));
}

std::string reason_of(const Machine& m, const char* device, const char* policy) {
  try {
    resolve(m, device, policy);
  } catch (const rm::Error& e) {
    return e.reason();
  }
  return "";
}

}  // namespace

TEST_CASE("auto takes the highest score and never a bridge") {
  FakeRoot root;
  root.node("dev/nvidia0").node("dev/nvidia1").node("dev/rbln0").node("dev/rbln1");
  CHECK(resolve(machine(root, {kTorchUp, kCpuUp}), "auto").device == "cpu");
  CHECK(resolve(machine(root, {kCpuUp, kCudaUp}), "auto").device == "cuda:0");
  CHECK(resolve(machine(root, {kCpuUp, kCudaUp, kRblnUp}), "auto").device == "rbln:0");
  BackendStatus slow_gpu = kCudaUp;
  slow_gpu.score = 50;
  CHECK(resolve(machine(root, {kCpuUp, slow_gpu}), "auto").device == "cpu");
  CHECK(resolve(machine(root, {kCpuUp, kSimUp}), "auto").device == "cpu");
}

TEST_CASE("equal scores prefer an NPU, then a GPU, then the CPU") {
  FakeRoot root;
  root.node("dev/rbln0").node("dev/nvidia0");
  BackendStatus cpu = kCpuUp, cuda = kCudaUp, rbln = kRblnUp;
  cpu.score = cuda.score = rbln.score = 100;
  CHECK(resolve(machine(root, {cpu, cuda, rbln}), "auto").device == "rbln:0");
  CHECK(resolve(machine(root, {cpu, cuda}), "auto").device == "cuda:0");
}

TEST_CASE("an asked-for device is used, by its index") {
  FakeRoot root;
  const Resolution gpu = resolve(machine(root, {kCpuUp, kCudaUp}), "gpu:1");
  CHECK(gpu.device == "cuda:1");
  CHECK(gpu.backend == "cuda");
  CHECK(gpu.index == 1);
  CHECK_FALSE(gpu.fell_back);
  CHECK(gpu.notes.empty());
  CHECK(resolve(machine(root, {kCpuUp, kSimUp}), "sim").device == "sim:0");
}

TEST_CASE("a plugin's own name is a device, never chosen by auto") {
  FakeRoot root;
  Machine m = machine(root, {kCpuUp, BackendStatus{"mine", 900, 2, ""}});
  CHECK(resolve(m, "mine:1").device == "mine:1");
  CHECK(resolve(m, "mine").backend == "mine");
  CHECK(resolve(m, "auto").device == "cpu");
  CHECK(resolve(m, "npu").device == "cpu");
  CHECK(reason_of(m, "mine:2", "warn") == "RM402");
  m.backends.back() = {"mine", 1, 0, "no driver"};
  CHECK(resolve(m, "mine").notes.at(0).message.find("no driver") != std::string::npos);
}

TEST_CASE("a name no plugin has is an error under every policy, one that failed to load is not") {
  FakeRoot root;
  Machine m = machine(root, {kCpuUp, kSimUp});
  for (const char* policy : {"warn", "allow", "error"}) {
    try {
      resolve(m, "mine:0", policy);
      FAIL("accepted");
    } catch (const rm::Error& e) {
      CHECK(e.code() == RM_INVALID_ARGUMENT);
      CHECK(std::string(e.what()).find("there are cpu, sim") != std::string::npos);
    }
  }
  m.failures.push_back({"/x/rm_backend_mine.so", "RM401", "[plugin] no libmine.so", {}});
  CHECK(resolve(m, "mine").device == "cpu");
  CHECK(resolve(m, "mine").notes.at(0).message == "[plugin] no libmine.so");
  CHECK(reason_of(m, "mine", "error") == "RM401");
  m.failures = {{"vendor.package:plugins", "RM405", "it raised", "mine"}};  // an entry point
  CHECK(resolve(m, "mine").notes.at(0).code == "RM405");
}

TEST_CASE("npu:N counts the devices of every vendor, the simulated one last and only when asked") {
  FakeRoot root;
  root.node("dev/rbln0").node("dev/rbln1").node("dev/rngd/npu0mgmt");
  Machine m = machine(root, {kCpuUp, kRblnUp, kFuriosaUp, kSimUp});
  CHECK(resolve(m, "npu").device == "rbln:0");
  CHECK(resolve(m, "npu:1").device == "rbln:1");
  CHECK(resolve(m, "npu:2").device == "furiosa:0");
  CHECK(reason_of(m, "npu:3", "warn") == "RM402");
  m.sim_is_npu = true;
  CHECK(resolve(m, "npu:3").device == "sim:0");
}

TEST_CASE("an index beyond a vendor's devices is an error under every policy") {
  FakeRoot root;
  const Machine m = machine(root, {kCpuUp, kCudaUp});
  for (const char* policy : {"warn", "allow", "error", "error:cache"}) {
    CHECK(reason_of(m, "gpu:2", policy) == "RM402");
  }
}

TEST_CASE("a device that is not there falls back with a reason, or is an error when asked for") {
  FakeRoot root;
  const Machine m = machine(root, {kCpuUp});
  const Resolution fallen = resolve(m, "gpu");
  CHECK(fallen.device == "cpu");
  CHECK(fallen.fell_back);
  CHECK(fallen.action == FallbackPolicy::Action::kWarn);
  REQUIRE(fallen.notes.size() == 1);
  CHECK(fallen.notes[0].code == "RM402");
  CHECK(fallen.notes[0].message.find("/dev/nvidia<number>") != std::string::npos);
  CHECK(resolve(m, "gpu", "allow").action == FallbackPolicy::Action::kAllow);
  CHECK(reason_of(m, "gpu", "error") == "RM402");
  CHECK(reason_of(m, "gpu", "error:device") == "RM402");
  CHECK(reason_of(m, "gpu", "error:compile") == "");
  const std::vector<Note> npu = resolve(m, "npu").notes;  // one line for every vendor
  REQUIRE(npu.size() == 1);
  CHECK(npu[0].code == "RM402");
  CHECK(npu[0].message.find("/dev/rbln") != std::string::npos);
  CHECK(npu[0].message.find("/dev/rngd/npu") != std::string::npos);
}

TEST_CASE("hardware without its plugin is RM401, also for auto") {
  FakeRoot root;
  root.node("dev/rbln0");
  const Machine m = machine(root, {kCpuUp});
  CHECK(reason_of(m, "rbln", "error") == "RM401");
  const Resolution npu = resolve(m, "npu");  // the other vendor's absence is no news
  REQUIRE(npu.notes.size() == 1);
  CHECK(npu.notes[0].message.find("rebel-compiler") != std::string::npos);
  const Resolution chosen = resolve(m, "auto");
  CHECK(chosen.device == "cpu");
  CHECK_FALSE(chosen.fell_back);
  REQUIRE(chosen.notes.size() == 1);
  CHECK(chosen.notes[0].code == "RM401");
}

TEST_CASE("a plugin that failed to load gives its own reason") {
  FakeRoot root;
  root.node("dev/rbln0");
  Machine m = machine(root, {kCpuUp});
  m.failures.push_back({"/x/rm_backend_rbln.so", "RM403", "[plugin] expected major 1, got 2", {}});
  const Resolution fallen = resolve(m, "rbln");
  REQUIRE(fallen.notes.size() == 1);
  CHECK(fallen.notes[0].code == "RM403");
}

TEST_CASE("a backend that cannot run passes its explanation on") {
  FakeRoot root;
  root.node("dev/nvidia0");
  BackendStatus broken{"cuda", 0, 0, "libcuda.so.1: driver too old"};
  const Resolution fallen = resolve(machine(root, {kCpuUp, broken}), "gpu");
  REQUIRE(fallen.notes.size() == 1);
  CHECK(fallen.notes[0].code == "RM401");
  CHECK(fallen.notes[0].message.find("driver too old") != std::string::npos);
}

TEST_CASE("a card without its driver is RM406 and other makers' functions do not count") {
  FakeRoot root;
  root.pci("0x1eff", "0x120000").pci("0x10de", "0x060400").pci("0x8086", "0x030000");
  const Machine m = machine(root, {kCpuUp});
  CHECK(resolve(m, "rbln").notes[0].code == "RM406");
  CHECK(resolve(m, "gpu").notes[0].code == "RM402");
}

TEST_CASE("a Warboy is refused by name, not taken for a card without its driver") {
  FakeRoot root;
  root.node("dev/npu0").node("dev/npu0pe0").pci("0x1ed2", "0x120000");
  const Machine m = machine(root, {kCpuUp, kFuriosaUp});
  for (const char* asked : {"npu", "furiosa", "auto"}) {
    const Resolution fallen = resolve(m, asked);
    CHECK(fallen.device == "cpu");
    REQUIRE(fallen.notes.size() == 1);
    CHECK(fallen.notes[0].code == "RM401");
    CHECK(fallen.notes[0].message.find("/dev/npu0, a Warboy") != std::string::npos);
  }
  root.node("dev/rngd/npu0mgmt");  // beside a card of the supported kind it is no news
  CHECK(resolve(machine(root, {kCpuUp, kFuriosaUp}), "npu").device == "furiosa:0");
  CHECK(resolve(machine(root, {kCpuUp, kFuriosaUp}), "auto").notes.empty());
}

TEST_CASE("an NPU runtime that claims devices on a machine without any is not believed") {
  FakeRoot root;
  BackendStatus claims{"furiosa", 300, 64, ""};
  CHECK(resolve(machine(root, {kCpuUp, claims}), "auto").device == "cpu");
  CHECK(reason_of(machine(root, {kCpuUp, claims}), "furiosa", "error") == "RM402");
}

TEST_CASE("only numbered nodes count and they come by number") {
  FakeRoot root;
  root.node("dev/nvidiactl").node("dev/nvidia10").node("dev/nvidia2").node("dev/nvidia-uvm");
  root.node("dev/rngd/npu0pe0").node("dev/rngd/npu1mgmt").node("dev/rblnx").node("dev/rsd0");
  const auto found = detect_hardware(root.path());
  CHECK(found[0].nodes == std::vector<std::string>{"/dev/nvidia2", "/dev/nvidia10"});
  CHECK(found[1].nodes.empty());
  CHECK(found[2].nodes == std::vector<std::string>{"/dev/rngd/npu1mgmt"});
}

TEST_CASE("a node without permission is RM404" * doctest::skip(geteuid() == 0)) {  // root may all
  FakeRoot root;
  root.node("dev/rbln0");
  fs::permissions(root.path() / "dev/rbln0", fs::perms::none);
  CHECK(resolve(machine(root, {kCpuUp}), "rbln").notes[0].code == "RM404");
}

TEST_CASE("without any usable backend resolving fails and says what is missing") {
  FakeRoot root;
  CHECK(reason_of(machine(root, {kTorchUp}), "auto", "allow") == "RM405");
}
