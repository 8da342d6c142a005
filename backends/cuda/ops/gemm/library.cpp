// See library.hpp. A plan holds descriptors and the ranked algorithms; pointers of bias and aux are
// set at each call, under the lock.
#include "gemm/library.hpp"

#include <dlfcn.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>

#include "_shim/dispatch_shim.hpp"
#include "gemm/cublaslt_abi.hpp"
#include "gemm/timing.hpp"

namespace rm::cuda_ops {
namespace {

constexpr int kCandidates = 8;

struct Plan {
  lt::Handle handle = nullptr;
  lt::MatmulDesc desc = nullptr;
  lt::Layout a = nullptr, b = nullptr, c = nullptr, d = nullptr;
  std::vector<lt::HeuristicResult> algorithms;
  std::size_t best = 0;
  bool timed = false;
  const char* why_not = nullptr;
};

void* open_library(const std::vector<std::string>& paths) {
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    if (void* h = dlopen(name, RTLD_NOW | RTLD_LOCAL | RTLD_NOLOAD)) return h;
  }
  for (const std::string& path : paths) {
    if (void* h = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return h;
  }
  for (const char* name : {"libcublasLt.so.13", "libcublasLt.so.12"}) {
    if (void* h = dlopen(name, RTLD_NOW | RTLD_LOCAL)) return h;
  }
  return nullptr;
}

template <class F>
bool symbol(void* library, const char* name, F** out) {
  *out = reinterpret_cast<F*>(dlsym(library, name));
  return *out != nullptr;
}

bool load(void* h, lt::Functions& f) {
  return symbol(h, "cublasLtGetVersion", &f.get_version) &&
         symbol(h, "cublasLtCreate", &f.create) && symbol(h, "cublasLtDestroy", &f.destroy) &&
         symbol(h, "cublasLtMatmulDescCreate", &f.desc_create) &&
         symbol(h, "cublasLtMatmulDescDestroy", &f.desc_destroy) &&
         symbol(h, "cublasLtMatmulDescSetAttribute", &f.desc_set) &&
         symbol(h, "cublasLtMatrixLayoutCreate", &f.layout_create) &&
         symbol(h, "cublasLtMatrixLayoutDestroy", &f.layout_destroy) &&
         symbol(h, "cublasLtMatrixLayoutSetAttribute", &f.layout_set) &&
         symbol(h, "cublasLtMatmulPreferenceCreate", &f.preference_create) &&
         symbol(h, "cublasLtMatmulPreferenceDestroy", &f.preference_destroy) &&
         symbol(h, "cublasLtMatmulPreferenceSetAttribute", &f.preference_set) &&
         symbol(h, "cublasLtMatmulAlgoGetHeuristic", &f.heuristic) &&
         symbol(h, "cublasLtMatmul", &f.matmul);
}

int type_of(int dtype) {
  switch (static_cast<DType>(dtype)) {
    case DType::bf16:
      return lt::kTypeBf16;
    case DType::f16:
      return lt::kTypeF16;
    default:
      return lt::kTypeF32;
  }
}

bool refused(int code) { return code == lt::kInvalidValue || code == lt::kNotSupported; }

Status failed(int code, const char* what) {
  return {refused(code) ? Code::unsupported : Code::device_error,
          std::string("[gemm] expected cuBLASLt to ") + what + ", got its status " +
              std::to_string(code) + "; try another kernel"};
}

bool make_layout(const lt::Functions& f, lt::Layout* out, int type, std::int64_t rows,
                 std::int64_t columns, std::int64_t pitch, std::int64_t batch,
                 std::int64_t batch_stride) {
  if (f.layout_create(out, type, static_cast<std::uint64_t>(rows),
                      static_cast<std::uint64_t>(columns), pitch) != 0) {
    return false;
  }
  const auto count = static_cast<std::int32_t>(batch);
  return f.layout_set(*out, lt::kBatchCount, &count, sizeof count) == 0 &&
         f.layout_set(*out, lt::kBatchOffset, &batch_stride, sizeof batch_stride) == 0;
}

}  // namespace

struct GemmLibrary::State {
  lt::Functions f{};
  std::map<int, lt::Handle> handles;  // a device's
  const char* why_not = nullptr;
  std::mutex mutex;
  std::map<std::string, Plan> plans;
  std::map<std::string, int> rows;

  Plan& plan_of(const LibraryProduct& p, int candidates);
  bool describe(const LibraryProduct& p, Plan& plan) const;
  void search(const LibraryProduct& p, Plan& plan, int candidates);
  /// The fastest algorithm's number; without the lock.
  std::size_t time(const LibraryProduct& p, const LibraryOperands& o, const Plan& plan, Workspace w,
                   Stream s) const;
  int launch(const LibraryProduct& p, const LibraryOperands& o, const Plan& plan, std::size_t which,
             Workspace w, Stream s) const;
  void destroy(const Plan& plan) const;
};

GemmLibrary::GemmLibrary(std::vector<std::string> paths) : state_(std::make_unique<State>()) {
  void* h = open_library(paths);  // stays open: kernels may still run at exit
  if (h == nullptr) {
    state_->why_not = "libcublasLt.so.13 was not found (it comes with nvidia-cublas or CUDA)";
  } else if (!load(h, state_->f)) {
    state_->why_not = "libcublasLt lacks a function that is needed";
  }
}

GemmLibrary::~GemmLibrary() {
  for (auto& [key, plan] : state_->plans) state_->destroy(plan);
  for (auto& [device, handle] : state_->handles) {
    if (handle) state_->f.destroy(handle);
  }
}

const char* GemmLibrary::why_not() const { return state_->why_not; }

std::size_t GemmLibrary::version() const { return state_->why_not ? 0 : state_->f.get_version(); }

void GemmLibrary::State::destroy(const Plan& plan) const {
  for (lt::Layout l : {plan.a, plan.b, plan.c, plan.d}) {
    if (l) f.layout_destroy(l);
  }
  if (plan.desc) f.desc_destroy(plan.desc);
}

bool GemmLibrary::State::describe(const LibraryProduct& p, Plan& plan) const {
  const int type = type_of(p.dtype);
  const int compute = p.tf32 && type == lt::kTypeF32 ? lt::kComputeTf32 : lt::kCompute32F;
  if (f.desc_create(&plan.desc, compute, lt::kTypeF32) != 0) return false;
  const std::int32_t ta = p.trans_a, tb = p.trans_b;
  const auto epilogue = static_cast<std::uint32_t>(p.epilogue);
  bool ok = f.desc_set(plan.desc, lt::kTransA, &ta, 4) == 0 &&
            f.desc_set(plan.desc, lt::kTransB, &tb, 4) == 0 &&
            f.desc_set(plan.desc, lt::kEpilogue, &epilogue, 4) == 0;
  if (p.epilogue & 128) {
    ok = ok && f.desc_set(plan.desc, lt::kAuxPitch, &p.aux_pitch, 8) == 0 &&
         f.desc_set(plan.desc, lt::kAuxBatchStride, &p.aux_batch, 8) == 0;
  }
  return ok &&
         make_layout(f, &plan.a, type, p.trans_a ? p.depth : p.rows, p.trans_a ? p.rows : p.depth,
                     p.a_pitch, p.batch, p.a_batch) &&
         make_layout(f, &plan.b, type, p.trans_b ? p.columns : p.depth,
                     p.trans_b ? p.depth : p.columns, p.b_pitch, p.batch, p.b_batch) &&
         make_layout(f, &plan.c, type, p.rows, p.columns, p.c_pitch, p.batch, p.c_batch) &&
         make_layout(f, &plan.d, type, p.rows, p.columns, p.d_pitch, p.batch, p.d_batch);
}

void GemmLibrary::State::search(const LibraryProduct& p, Plan& plan, int candidates) {
  lt::Preference preference = nullptr;
  if (f.preference_create(&preference) != 0) return;
  const auto bytes = static_cast<std::uint64_t>(p.workspace_bytes);
  f.preference_set(preference, lt::kMaxWorkspace, &bytes, sizeof bytes);
  const int attributes[] = {lt::kAlignmentA, lt::kAlignmentB, lt::kAlignmentC, lt::kAlignmentD};
  for (int i = 0; i < 4; ++i) {
    const auto alignment = static_cast<std::uint32_t>(p.alignment[i]);
    f.preference_set(preference, attributes[i], &alignment, sizeof alignment);
  }
  std::vector<lt::HeuristicResult> found(static_cast<std::size_t>(candidates));
  int count = 0;
  if (f.heuristic(handles[p.device], plan.desc, plan.a, plan.b, plan.c, plan.d, preference,
                  candidates, found.data(), &count) == 0) {
    for (int i = 0; i < count; ++i) {
      if (found[static_cast<std::size_t>(i)].state == 0) {
        plan.algorithms.push_back(found[static_cast<std::size_t>(i)]);
      }
    }
  }
  f.preference_destroy(preference);
}

Plan& GemmLibrary::State::plan_of(const LibraryProduct& p, int candidates) {
  const std::string key(reinterpret_cast<const char*>(&p), sizeof p);
  const auto [it, fresh] = plans.try_emplace(key);
  Plan& plan = it->second;
  if (!fresh) return plan;
  lt::Handle& handle = handles[p.device];
  if (handle == nullptr && f.create(&handle) != 0) {
    handle = nullptr;
    plan.why_not = "cublasLtCreate failed";
  } else if (plan.handle = handle; !describe(p, plan)) {
    plan.why_not = "cuBLASLt does not describe the product";
  } else {
    search(p, plan, candidates);
    if (plan.algorithms.empty()) plan.why_not = "cuBLASLt has no algorithm for the product";
  }
  return plan;
}

int GemmLibrary::State::launch(const LibraryProduct& p, const LibraryOperands& o, const Plan& plan,
                               std::size_t which, Workspace w, Stream stream) const {
  if (p.epilogue & kBias) f.desc_set(plan.desc, lt::kBiasPointer, &o.bias, sizeof o.bias);
  if (p.epilogue & 128) f.desc_set(plan.desc, lt::kAuxPointer, &o.aux, sizeof o.aux);
  const float beta = p.add_c ? 1.0f : 0.0f;
  return f.matmul(plan.handle, plan.desc, &o.alpha, o.a, plan.a, o.b, plan.b, &beta,
                  p.add_c ? o.c : o.d, plan.c, o.d, plan.d, &plan.algorithms[which].algo, w.data,
                  w.bytes, stream);
}

std::size_t GemmLibrary::State::time(const LibraryProduct& p, const LibraryOperands& o,
                                     const Plan& shared, Workspace w, Stream stream) const {
  Plan plan;  // descriptors of its own: others may run the product meanwhile
  plan.handle = shared.handle, plan.algorithms = shared.algorithms;
  std::size_t best = shared.best;
  if (describe(p, plan)) {
    const std::int64_t elements = p.batch * p.depth * (p.rows + p.columns);
    const auto size = size_of(static_cast<DType>(p.dtype));
    const double tera = compute_rate(static_cast<DType>(p.dtype) == DType::f32 ? 40 : 600);
    const double about_us = 2e-6 / tera * static_cast<double>(p.rows * p.columns) *
                            static_cast<double>(p.depth * p.batch);
    TimedChoice choice(stream, cold_for(elements * static_cast<std::int64_t>(size), w), about_us);
    for (std::size_t i = 0; i < plan.algorithms.size(); ++i) {
      const auto run = [&](Stream on) -> Status {
        const int code = launch(p, o, plan, i, w, on);
        return code == 0 ? Status{} : failed(code, "run an algorithm it offered");
      };
      if (!choice.add(static_cast<int>(i), run)) break;
    }
    int fastest = 0;
    if (choice.fastest(&fastest) && fastest >= 0) best = static_cast<std::size_t>(fastest);
  }
  destroy(plan);
  return best;
}

const char* GemmLibrary::plan(const LibraryProduct& p, int candidates) {
  if (state_->why_not) return state_->why_not;
  const std::lock_guard lock(state_->mutex);
  return state_->plan_of(p, candidates > 0 ? candidates : kCandidates).why_not;
}

Status GemmLibrary::run(const LibraryProduct& p, const LibraryOperands& o, Workspace workspace,
                        Stream stream, bool tune) {
  std::unique_lock lock(state_->mutex);
  Plan& plan = state_->plan_of(p, kCandidates);
  if (tune && plan.why_not == nullptr && !plan.timed) {
    plan.timed = true;
    const Plan known = plan;
    lock.unlock();  // timing takes seconds; a product of another thread need not wait
    const std::size_t best = state_->time(p, o, known, workspace, stream);
    lock.lock();
    if (plan.algorithms.size() == known.algorithms.size()) plan.best = best;
  }
  while (plan.why_not == nullptr) {
    const int code = state_->launch(p, o, plan, plan.best, workspace, stream);
    if (code == 0) return {};
    if (!refused(code)) return failed(code, "run a product");
    plan.algorithms.erase(plan.algorithms.begin() + static_cast<std::ptrdiff_t>(plan.best));
    plan.best = 0;
    if (plan.algorithms.empty()) plan.why_not = "cuBLASLt refuses the product it offered to run";
  }
  return unsupported(std::string("[gemm] cuBLASLt: ") + plan.why_not);
}

int GemmLibrary::known_row(const std::string& key) const {
  const std::lock_guard lock(state_->mutex);
  const auto it = state_->rows.find(key);
  return it == state_->rows.end() ? -1 : it->second;
}

void GemmLibrary::remember_row(const std::string& key, int row) {
  const std::lock_guard lock(state_->mutex);
  state_->rows[key] = row;
}

}  // namespace rm::cuda_ops
