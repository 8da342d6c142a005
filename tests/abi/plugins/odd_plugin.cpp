// Plugins that break one rule each (or come from another version), chosen by RM_ODD; everything
// else about them is legal.  Built by tests/cpp/backend, loaded by its tests and by tests/abi.
#include <cstring>
#include <stdexcept>

#include "rm/backend.h"
#include "rm/kernels.h"

#ifndef RM_ODD
#error "define RM_ODD"
#endif

namespace {

constexpr int kOdd = RM_ODD;
enum : int {
  kNewer = 1,  // a later minor: longer structs everywhere
  kOlder = 2,  // knows only the first fields of rm_device_info
  kThrowsInQuery = 3,
  kThrowsInInitialize = 4,
  kThrowsInProbe = 5,
  kOverrunsInfo = 6,    // writes rm_device_info past the caller's struct_size
  kTruncatedTable = 7,  // struct_size smaller than version 1.0
  kHugeTable = 8,       // struct_size nonsense
  kWrongMajor = 9,
  kRefuses = 10,  // returns NULL
  kTooManyDevices = 11,
  kShortRows = 12,  // rows shorter than version 1.0
  kRowLongerThanStride = 13,
  kIncompleteRow = 14,
  kNoDevices = 15,
  kFailsToInitialize = 16,
  kThrowsNothingStandard = 17,
  kNoDeviceHandle = 18,  // says OK and gives no handle: for a device, and for all else
  kNoHandles = 19
};

rm_str str(const char* text) { return {text, std::strlen(text)}; }
const rm_host_api* host = nullptr;
int device_object = 0;

struct NewerApi {
  rm_backend_api api;
  void* later[8];
};
struct NewerKernel {
  rm_kernel row;
  void* later[3];
};
struct NewerInfo {
  rm_device_info info;
  uint64_t later[20];
};

rm_status* initialize(rm_options) {
  if (kOdd == kThrowsInInitialize) throw std::runtime_error("initialize threw");
  if (kOdd == kThrowsNothingStandard) throw 42;
  if (kOdd == kFailsToInitialize) {
    return host->status_create(RM_UNAVAILABLE, str("no licence"), __FILE__, __LINE__);
  }
  return nullptr;
}

rm_status* device_count(size_t* out) {
  *out = kOdd == kTooManyDevices ? SIZE_MAX : kOdd == kNoDevices ? 0 : 1;
  return nullptr;
}

rm_status* device_info(rm_device*, rm_device_info* out) {
  NewerInfo mine{};
  mine.info.caps = RM_CAP_HOST_POINTERS;
  mine.info.dl_device_type = kDLCPU;
  mine.info.memory_bytes = 1 << 20;
  mine.info.alignment = 64;
  mine.info.name = mine.info.arch = str("odd");
  std::memset(mine.later, 0xEE, sizeof mine.later);
  size_t known = kOdd == kNewer || kOdd == kOverrunsInfo ? sizeof(NewerInfo) : sizeof mine.info;
  if (kOdd == kOlder) known = offsetof(rm_device_info, alignment);
  const size_t room = kOdd == kOverrunsInfo ? known : out->struct_size;
  mine.info.struct_size = known < room ? known : room;
  if (kOdd == kOverrunsInfo) mine.info.struct_size = sizeof(rm_device_info);
  std::memcpy(out, &mine, known < room ? known : room);
  return nullptr;
}

int supports(const rm_problem*, const rm_device_info*, rm_str*) { return 1; }
double cost_ns(const rm_problem*, const rm_device_info*, uint32_t) { return 1; }
rm_status* prepare(const rm_problem*, const rm_device_info*, uint32_t, rm_kernel_state** out) {
  *out = nullptr;
  return nullptr;
}
void release(rm_kernel_state*) {}
rm_status* launch(const rm_launch*) { return nullptr; }

const void* extension(rm_str) {
  static NewerKernel rows[2] = {};
  static rm_kernels table{};
  const char* names[] = {"copy_first", "copy_second"};
  for (int i = 0; i < 2; ++i) {
    rm_kernel& row = rows[i].row;
    row.struct_size = sizeof(NewerKernel);
    row.op = str("copy");
    row.name = str(names[i]);
    row.digest = str("1");
    row.traits = i == 1 ? RM_KERNEL_FALLBACK : 0;
    row.num_configs = 1;
    row.supports = &supports;
    row.cost_ns = &cost_ns;
    row.prepare = &prepare;
    row.release = &release;
    row.launch = kOdd == kIncompleteRow ? nullptr : &launch;
  }
  table = {sizeof(rm_kernels), &rows[0].row, 2, sizeof(NewerKernel)};
  if (kOdd == kShortRows) table.row_stride = 64;
  if (kOdd == kRowLongerThanStride) rows[1].row.struct_size = 4096;
  return &table;
}

}  // namespace

extern "C" __attribute__((visibility("default"))) const rm_backend_api* rm_backend_query(
    uint32_t, const rm_host_api* host_api) {
  if (kOdd == kThrowsInQuery) throw std::runtime_error("query threw");
  if (kOdd == kRefuses) return nullptr;
  host = host_api;
  static NewerApi table{};
  rm_backend_api& api = table.api;
  api.struct_size = kOdd == kNewer ? sizeof(NewerApi) : sizeof(rm_backend_api);
  if (kOdd == kTruncatedTable) api.struct_size = 120;
  if (kOdd == kHugeTable) api.struct_size = SIZE_MAX;
  api.abi_version = kOdd == kNewer        ? RM_ABI_VERSION + 7
                    : kOdd == kWrongMajor ? (RM_ABI_MAJOR + 1) << 16
                                          : RM_ABI_VERSION;
  api.name = str("odd");
  api.version = str("1");
  api.probe_score = +[]() -> int {
    if (kOdd == kThrowsInProbe) throw std::runtime_error("probe threw");
    return 1;
  };
  api.initialize = &initialize;
  api.device_count = &device_count;
  api.device_open = +[](size_t, rm_device** out) -> rm_status* {
    if (kOdd != kNoDeviceHandle) *out = reinterpret_cast<rm_device*>(&device_object);
    return nullptr;
  };
  if (kOdd == kNoHandles) {
    api.compile = +[](rm_device*, const rm_program*, const rm_compile_options*,
                      rm_executable**) -> rm_status* { return nullptr; };
    api.deserialize = +[](rm_device*, rm_bytes, rm_constants, rm_executable**) -> rm_status* {
      return nullptr;
    };
    api.buffer_alloc =
        +[](rm_device*, uint32_t, size_t, size_t, rm_buffer**) -> rm_status* { return nullptr; };
    api.stream_create = +[](rm_device*, uint32_t, rm_stream**) -> rm_status* { return nullptr; };
    api.stream_wrap = +[](rm_device*, void*, rm_stream**) -> rm_status* { return nullptr; };
    api.event_create = +[](rm_device*, rm_event**) -> rm_status* { return nullptr; };
  }
  api.device_info = &device_info;
  api.extension = &extension;
  return &api;
}
