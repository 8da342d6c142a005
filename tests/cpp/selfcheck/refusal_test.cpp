// Rows made wrong on purpose are refused on their first prepare, the next row serves, and the
// verdict outlives the process.
#include <doctest/doctest.h>

#include <sys/mman.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <mutex>

#include "base/error.hpp"
#include "base/log.hpp"
#include "ir/scalar.hpp"
#include "ops/host_tensor.hpp"
#include "problems.hpp"
#include "select/prepared_kernels.hpp"
#include "selfcheck/operands.hpp"
#include "selfcheck/self_check.hpp"

using namespace rm;
using namespace rm::selfcheck_test;
using selfcheck::SelfCheck;

namespace {

enum class Fault { kNone, kColumn, kTail, kType, kOutside };
constexpr Fault kFaults[] = {Fault::kColumn, Fault::kTail, Fault::kType, Fault::kOutside};

// Kernels are C functions without a context, so what a wrong one does lies here.
struct Wrong {
  const rm_kernel* kernel = nullptr;
  Fault fault = Fault::kNone;
  ir::DType only = ir::DType::kF32;  // of kType
  std::map<const rm_kernel_state*, ir::Layout> outputs;
  std::mutex mutex;
  int launches = 0;
  selfcheck::Place* place = nullptr;  // of a device: what it launches is changed there
} wrong;

/// The backend's own, remembered for the faults.
std::unique_ptr<selfcheck::Place> watched_place(const select::Row& row) {
  auto place = selfcheck::place_of(row);
  wrong.place = place.get();
  return place;
}

ir::Layout layout_of(const rm_tensor& t) {
  ir::Layout out;
  ir::from_dlpack(t.dtype, &out.dtype);
  out.dims.assign(t.shape, t.shape + t.ndim);
  out.strides.assign(t.strides, t.strides + t.ndim);
  return out;
}

rm_status* wrong_prepare(const rm_problem* p, const rm_device_info* d, uint32_t c, rm_kernel_state** out) {
  rm_status* status = wrong.kernel->prepare(p, d, c, out);
  const std::lock_guard lock(wrong.mutex);
  if (status == nullptr) wrong.outputs[*out] = layout_of(*p->outputs[0]);
  return status;
}

void change(const ir::Layout& l, std::byte* base, int64_t offset) {
  std::byte* at = base + offset * static_cast<int64_t>(ir::size_bytes(l.dtype));
  if (l.dtype == ir::DType::kBool) {
    *at = *at == std::byte{0} ? std::byte{1} : std::byte{0};
  } else if (ir::is_floating(l.dtype)) {
    const double x = ir::load_element(l.dtype, at);
    ir::store_element(l.dtype, at, x + 0.125 * (1 + std::abs(x)));
  } else {
    *at ^= std::byte{1};
  }
}

void make_wrong(const ir::Layout& l, std::byte* base, int64_t end) {
  const std::vector<int64_t> at = ops::strided_offsets(l.dims, l.strides);
  const int64_t last = l.dims.empty() ? 1 : l.dims.back();
  for (size_t i = 0; i < at.size(); ++i) {
    const int64_t column = static_cast<int64_t>(i) % last;
    const bool hit = (wrong.fault == Fault::kColumn && column == last / 2) ||
                     (wrong.fault == Fault::kTail && column == last - 1) ||
                     (wrong.fault == Fault::kType && l.dtype == wrong.only);
    if (hit) change(l, base, at[i]);
  }
  if (wrong.fault == Fault::kOutside) base[end] = std::byte{7};
}

rm_status* wrong_launch(const rm_launch* launch) {
  rm_status* status = wrong.kernel->launch(launch);
  if (status != nullptr) return status;
  ir::Layout l;
  {
    const std::lock_guard lock(wrong.mutex);
    ++wrong.launches;
    l = wrong.outputs[launch->state];
  }
  const auto end = static_cast<int64_t>(selfcheck::extent_bytes(l));
  auto* base = static_cast<std::byte*>(launch->outputs[0]);
  if (wrong.place == nullptr) {
    make_wrong(l, base, end);
  } else if (wrong.fault != Fault::kNone) {
    std::vector<std::byte> here(static_cast<size_t>(end) + 1);
    wrong.place->copy_out(here.data(), base, here.size());
    make_wrong(l, here.data(), end);
    wrong.place->copy_in(base, here.data(), here.size());
  }
  return nullptr;
}

rm_kernel made_wrong(const rm_kernel& kernel, Fault fault, ir::DType only) {
  wrong.kernel = &kernel;
  wrong.fault = fault;
  wrong.only = only;
  wrong.outputs.clear();
  wrong.launches = 0;
  rm_kernel out = kernel;
  out.prepare = wrong_prepare;
  out.launch = wrong_launch;
  return out;
}

/// A device's memory: the host may not touch it but in copies and kernels.
class FarMemory : public selfcheck::Place {
 public:
  FarMemory() { current = this; }
  ~FarMemory() override { current = nullptr; }
  template <class Body>
  auto within(Body body) {
    mprotect(base_, bytes_, PROT_READ | PROT_WRITE);
    struct Close {
      FarMemory& self;
      ~Close() { mprotect(self.base_, self.bytes_, PROT_NONE); }
    } close{*this};
    return body();
  }
  std::shared_ptr<void> allocate(size_t bytes) override {
    bytes_ = (bytes + 4095) / 4096 * 4096 + 4096;
    base_ = mmap(nullptr, bytes_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    REQUIRE(base_ != MAP_FAILED);
    return {base_, [size = bytes_](void* p) { munmap(p, size); }};
  }
  void copy_in(void* to, const void* from, size_t bytes) override {
    within([&] { std::memcpy(to, from, bytes); });
  }
  void copy_out(void* to, const void* from, size_t bytes) override {
    within([&] { std::memcpy(to, from, bytes); });
  }
  rm_stream* stream() override { return reinterpret_cast<rm_stream*>(this); }
  static inline FarMemory* current = nullptr;

 private:
  void* base_ = nullptr;
  size_t bytes_ = 0;
};

rm_status* far_launch(const rm_launch* launch) {
  FarMemory& memory = *FarMemory::current;
  CHECK(launch->stream == memory.stream());
  return memory.within([&] { return wrong_launch(launch); });
}

rm_status* far_prepack(const rm_kernel_state* state, size_t input, const rm_tensor* src, void* dst) {
  return FarMemory::current->within([&] { return wrong.kernel->prepack(state, input, src, dst); });
}

rm_device_info far_device() {
  rm_device_info info = cpu().get_device_info(0);
  info.dl_device_type = kDLCUDA;
  return info;
}

struct Folder {
  std::string path;
  Folder() {
    std::string pattern = (std::filesystem::temp_directory_path() / "rm_selfcheck_XXXXXX").string();
    path = mkdtemp(pattern.data());
  }
  ~Folder() { std::filesystem::remove_all(path); }
};

struct Silent {
  Silent() { configure_log("off"); }
  ~Silent() { configure_log("warn"); }
};

}  // namespace

TEST_CASE("a row that is wrong in a column, a tail, for a type or outside is refused, in every operator") {
  const Silent silent;
  std::map<std::string, int> refused;
  for (const auto& shape : problems()) {
    const auto problem = problem_of(shape);
    for (const rm_kernel& kernel : cpu().kernels()) {
      if (!supports(kernel, shape)) continue;
      for (Fault fault : kFaults) {
        const rm_kernel bad = made_wrong(kernel, fault, shape.outputs[0].layout.dtype);
        const select::Row row{&bad, &cpu().get_device_info(0), cpu().name()};
        selfcheck::Settings settings;
        settings.place = watched_place;
        SelfCheck check(settings);
        CAPTURE(text(kernel.name));
        CAPTURE(problem->str());
        CAPTURE(static_cast<int>(fault));
        CHECK(check.refusal(row, 0, *problem) != "");
        CHECK(check.report().refused.size() == 1);
        ++refused[shape.op];
      }
      break;  // of the rows of an operator, the first that serves
    }
  }
  CHECK(refused.size() == operators().size());
  wrong.place = nullptr;
}

TEST_CASE("rows of a device are run in its memory, on a stream, and refused for the same faults") {
  const Silent silent;
  const rm_device_info device = far_device();
  selfcheck::Settings settings;
  settings.place = [](const select::Row& row) -> std::unique_ptr<selfcheck::Place> {
    CHECK(row.place().device_type == kDLCUDA);
    return std::make_unique<FarMemory>();
  };
  std::map<std::string, int> seen;
  for (const auto& shape : problems()) {
    const auto problem = problem_of(shape);
    for (const rm_kernel& kernel : cpu().kernels()) {
      if (!supports(kernel, shape) || ++seen[shape.op] > 2) continue;
      for (Fault fault : {Fault::kNone, Fault::kColumn, Fault::kTail, Fault::kType, Fault::kOutside}) {
        rm_kernel row = made_wrong(kernel, fault, shape.outputs[0].layout.dtype);
        row.launch = far_launch;
        if (row.prepack != nullptr) row.prepack = far_prepack;
        SelfCheck check(settings);
        CAPTURE(text(kernel.name));
        CAPTURE(problem->str());
        CAPTURE(static_cast<int>(fault));
        const std::string why = check.refusal({&row, &device, "far"}, 0, *problem);
        CHECK((why == "") == (fault == Fault::kNone));
        CHECK(check.report().checked == 1);
      }
    }
  }
  CHECK(seen.size() == operators().size());
}

TEST_CASE("a device that cannot run a check now says nothing about the row, and nothing is remembered") {
  const Silent silent;
  const rm_device_info device = far_device();
  const auto problem = problem_of(gemm(8, 300, 96));
  struct Busy final : FarMemory {
    void copy_in(void*, const void*, size_t) override { throw Error(RM_UNAVAILABLE, "[device] busy"); }
  };
  struct Recording final : FarMemory {
    void copy_out(void*, const void*, size_t) override {
      throw Error(RM_FAILED_PRECONDITION, "[device] a graph is being recorded");
    }
  };
  const selfcheck::PlaceOf places[] = {
      [](const select::Row&) -> std::unique_ptr<selfcheck::Place> {
        throw Error(RM_RESOURCE_EXHAUSTED, "[device] expected memory, got none");
      },
      [](const select::Row&) { return std::make_unique<Busy>(); },
      [](const select::Row&) { return std::make_unique<Recording>(); },
  };
  for (const auto& place : places) {
    selfcheck::Settings settings;
    settings.place = place;
    SelfCheck check(settings);
    for (const rm_kernel& kernel : cpu().kernels()) {
      if (!supports(kernel, gemm(8, 300, 96))) continue;
      rm_kernel far = made_wrong(kernel, Fault::kNone, ir::DType::kF32);
      far.launch = far_launch;
      if (far.prepack != nullptr) far.prepack = far_prepack;
      CHECK(check.refusal({&far, &device, "far"}, 0, *problem).find("could not be checked") !=
            std::string::npos);
      CHECK(check.report().refused.empty());
      CHECK(check.report().checked == 0);
    }
  }
}

TEST_CASE("a wrong row is passed over, the next one serves, and without one there is an error") {
  const Silent silent;
  const auto shape = gemm(8, 300, 96);
  const auto problem = problem_of(shape);
  auto check = std::make_shared<SelfCheck>(selfcheck::Settings{});
  auto table = std::make_shared<select::KernelTable>(check);
  const rm_kernel* best = nullptr;
  for (const rm_kernel& kernel : cpu().kernels()) {
    if (best == nullptr && supports(kernel, shape)) best = &kernel;
  }
  REQUIRE(best != nullptr);
  rm_kernel bad = made_wrong(*best, Fault::kTail, ir::DType::kF32);
  bad.cost_ns = [](const rm_problem*, const rm_device_info*, uint32_t) { return 0.0; };
  table->add("cpu", &bad, &cpu().get_device_info(0));
  CHECK_THROWS_WITH_AS(select::PreparedCache(table).get(*problem), doctest::Contains("self-check"), Error);
  for (const rm_kernel& kernel : cpu().kernels()) {
    if (text(kernel.op) == "gemm" && &kernel != best) table->add("cpu", &kernel, &cpu().get_device_info(0));
  }
  select::PreparedCache cache(table);
  const auto chosen = cache.get(*problem);
  CHECK(chosen->row->kernel != &bad);
  CHECK(chosen->row->name() != text(best->name));
  CHECK(check->report().refused.size() == 1);
}

TEST_CASE("a verdict holds for all processes: passed rows are not run again, wrong ones stay refused") {
  const Silent silent;
  const Folder folder;
  const selfcheck::Settings settings{selfcheck::Mode::kAuto, folder.path, true};
  const auto shape = gemm(8, 300, 96);
  const auto problem = problem_of(shape);
  const rm_kernel* kernel = nullptr;
  for (const rm_kernel& row : cpu().kernels()) {
    if (kernel == nullptr && supports(row, shape)) kernel = &row;
  }
  rm_kernel row = made_wrong(*kernel, Fault::kNone, ir::DType::kF32);
  const select::Row good{&row, &cpu().get_device_info(0), "cpu"};
  CHECK(SelfCheck(settings).refusal(good, 0, *problem) == "");
  CHECK(wrong.launches == 1);
  SelfCheck second(settings);
  CHECK(second.refusal(good, 0, *problem) == "");
  CHECK(second.report().checked == 0);
  CHECK(second.report().remembered == 1);
  CHECK(wrong.launches == 1);

  // Another build of the row is another row.
  rm_kernel rebuilt = row;
  rebuilt.digest = {"other", 5};
  wrong.fault = Fault::kColumn;
  const select::Row bad{&rebuilt, &cpu().get_device_info(0), "cpu"};
  CHECK(SelfCheck(settings).refusal(bad, 0, *problem) != "");
  CHECK(wrong.launches == 3);  // two draws
  SelfCheck third(settings);
  CHECK(third.refusal(bad, 0, *problem) != "");
  CHECK(third.report().checked == 0);
  CHECK(third.report().refused.size() == 1);
  // Switched off, what is known to be wrong is still not used.
  CHECK(SelfCheck({selfcheck::Mode::kOff, folder.path, true}).refusal(bad, 0, *problem) != "");
  // Always: run again, in every process.
  SelfCheck always({selfcheck::Mode::kAlways, folder.path, true});
  CHECK(always.refusal(good, 0, *problem) != "");  // it is wrong by now
  CHECK(always.report().checked == 1);
}

TEST_CASE("a damaged file of verdicts costs checks, and nothing else") {
  const Silent silent;
  const Folder folder;
  const selfcheck::Settings settings{selfcheck::Mode::kAuto, folder.path, true};
  const auto problem = problem_of(gemm(8, 300, 96));
  const select::Row* row = nullptr;
  select::KernelTable table;
  for (const rm_kernel& kernel : cpu().kernels()) table.add("cpu", &kernel, &cpu().get_device_info(0));
  row = table.select(*problem).row;
  CHECK(SelfCheck(settings).refusal(*row, 0, *problem) == "");
  for (const auto& entry : std::filesystem::directory_iterator(folder.path)) {
    std::string bytes;
    {
      std::ifstream in(entry.path(), std::ios::binary);
      bytes.assign(std::istreambuf_iterator<char>(in), {});
    }
    for (size_t i = 0; i < bytes.size(); ++i) {
      std::string damaged = bytes;
      damaged[i] = static_cast<char>(damaged[i] ^ 0x41);
      std::ofstream(entry.path(), std::ios::binary) << damaged;
      SelfCheck check(settings);
      CHECK(check.refusal(*row, 0, *problem) == "");
      std::ofstream(entry.path(), std::ios::binary) << bytes.substr(0, i);
      CHECK(SelfCheck(settings).refusal(*row, 0, *problem) == "");
    }
  }
}
