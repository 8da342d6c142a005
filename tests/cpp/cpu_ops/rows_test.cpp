// What the plugin promises as a plugin: one symbol's table, complete rows, fallbacks, options.
#include <doctest/doctest.h>

#include <set>
#include <string>

#include "harness.hpp"

using namespace rm::test;

namespace {
std::string str(rm_str s) { return {s.data, s.size}; }
}  // namespace

TEST_CASE("every operator's last row is its fallback and no earlier one claims to be") {
  for (const char* op : {"sdpa", "layer_norm", "rms_norm", "softmax", "embedding", "rope", "ewise",
                         "reduce", "cumsum", "scan", "copy", "gather", "index", "index_copy",
                         "scatter", "grouped_gemm", "sort", "uniform", "adam", "quantize", "quant_linear", "recurrent", "check"}) {
    CAPTURE(std::string(op));
    const auto found = rows(op);
    REQUIRE(!found.empty());
    for (size_t i = 0; i < found.size(); ++i) {
      CHECK(((found[i]->traits & RM_KERNEL_FALLBACK) != 0) == (i + 1 == found.size()));
    }
  }
}

TEST_CASE("row names are unique and every required entry is there") {
  std::set<std::string> names;
  for (const rm_kernel* row : rows("")) {
    CAPTURE(str(row->name));
    CHECK(names.insert(str(row->name)).second);
    CHECK(row->struct_size >= sizeof(rm_kernel));
    CHECK(row->digest.size > 0);
    CHECK(row->num_configs >= 1);
    CHECK((row->supports && row->cost_ns && row->prepare && row->release && row->launch));
    row->release(nullptr);
  }
}

TEST_CASE("a host of another major version gets no table") {
  CHECK(plugin_query()((RM_ABI_MAJOR + 1) << 16, &host()) == nullptr);
  CHECK(plugin_query()(RM_ABI_VERSION, &host()) == &plugin());
  CHECK(plugin().abi_version == RM_ABI_VERSION);
  CHECK(plugin().struct_size == sizeof(rm_backend_api));
  CHECK(plugin().build_id.size >= 32);
}

TEST_CASE("the device answers, and whole-program entries say they are not offered") {
  size_t count = 0;
  REQUIRE(plugin().device_count(&count) == nullptr);
  REQUIRE(count == 1);
  rm_device* device = nullptr;
  REQUIRE(plugin().device_open(0, &device) == nullptr);
  rm_device_info info{};
  info.struct_size = sizeof info;
  REQUIRE(plugin().device_info(device, &info) == nullptr);
  CHECK(info.dl_device_type == kDLCPU);
  CHECK((info.caps & RM_CAP_HOST_POINTERS) != 0);
  rm_blob print{};
  REQUIRE(plugin().fingerprint(device, &print) == nullptr);
  const std::string text(static_cast<const char*>(print.data), print.size);
  CHECK(text.find(str(plugin().build_id)) != std::string::npos);
  CHECK(text.find("isa=") != std::string::npos);
  print.release(&print);
  rm_program program{sizeof(rm_program), {"rm.ir/1", 7}, {nullptr, 0}};
  rm_compile_options options{};
  options.struct_size = sizeof options;
  rm_executable* executable = nullptr;
  REQUIRE(refused(plugin().compile(device, &program, &options, &executable)));
  CHECK(executable == nullptr);
  rm_device* second = nullptr;
  CHECK(refused(plugin().device_open(1, &second)));
  plugin().device_close(device);
  plugin().device_close(nullptr);
}

TEST_CASE("the option cpu_isa lowers what rows take, and unknown values are refused") {
  const std::string key = "cpu_isa";
  const auto set = [&](const std::string& value) {
    const rm_option option{{key.data(), key.size()}, {value.data(), value.size()}};
    return plugin().initialize({&option, 1});
  };
  CHECK(refused(set("sse9")));
  REQUIRE(set("baseline") == nullptr);
  Tensor x(Type::f32, {4}), y(Type::f32, {4});
  for (const rm_kernel* row : rows("softmax")) {
    const bool baseline = str(row->name).find("baseline") != std::string::npos;
    CHECK(supports(*row, {"softmax", {&x}, {&y}, {}}) == baseline);
  }
  REQUIRE(set(isa()) == nullptr);
}
