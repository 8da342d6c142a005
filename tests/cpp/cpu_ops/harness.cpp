// The host side of the C ABI in a few lines, and tensors that notice stray writes.
#include "harness.hpp"

#include <dlfcn.h>
#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>

struct rm_status {
  rm_code code;
  std::string message;
};

namespace rm::test {
namespace {

constexpr unsigned char kGuard = 0xA5;

rm_status* status_create(rm_code code, rm_str message, const char*, int) {
  return new rm_status{code, std::string(message.data, message.size)};
}
void status_release(rm_status* s) { delete s; }
rm_code status_code(const rm_status* s) { return s ? s->code : RM_OK; }
rm_str status_message(const rm_status* s) { return {s->message.data(), s->message.size()}; }
void log_nothing(int, rm_str) {}

const rm_host_api kHost = {sizeof(rm_host_api), RM_ABI_VERSION, 0,
                           status_create,       status_release, status_code,
                           status_message,      log_nothing};

// Reference conversions, written from the formats' definitions: value by value, not bit tricks.
double round_to(double v, int digits, int min_exponent, double max_finite) {
  if (std::isnan(v) || std::isinf(v) || v == 0) return v;
  int e = 0;
  std::frexp(v, &e);
  const int lowest = std::max(e - digits, min_exponent);
  const double scaled = std::ldexp(v, -lowest);
  const double r = std::ldexp(std::nearbyint(scaled), lowest);
  return std::abs(r) > max_finite ? std::copysign(INFINITY, v) : r;
}

int64_t bytes_of(Type t) {
  switch (t) {
    case Type::f64:
    case Type::i64:
      return 8;
    case Type::f32:
    case Type::i32:
      return 4;
    case Type::bf16:
    case Type::f16:
    case Type::i16:
      return 2;
    default:
      return 1;
  }
}

DLDataType dl(Type t) {
  const auto bits = static_cast<uint8_t>(bytes_of(t) * 8);
  switch (t) {
    case Type::f32:
    case Type::f64:
    case Type::f16:
      return {kDLFloat, bits, 1};
    case Type::bf16:
      return {kDLBfloat, bits, 1};
    case Type::u8:
      return {kDLUInt, bits, 1};
    case Type::boolean:
      return {kDLBool, bits, 1};
    default:
      return {kDLInt, bits, 1};
  }
}

template <class T>
double load(const unsigned char* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return static_cast<double>(v);
}
template <class T>
void store(unsigned char* p, double v) {
  const T t = static_cast<T>(v);
  std::memcpy(p, &t, sizeof t);
}

double half_value(uint16_t bits) {
  const int e = (bits >> 10) & 31, m = bits & 1023;
  const double sign = bits >> 15 ? -1 : 1;
  if (e == 31) return m ? NAN : sign * INFINITY;
  return sign * (e ? std::ldexp(1024 + m, e - 25) : std::ldexp(m, -24));
}
uint16_t half_bits(double v) {
  v = round_to(v, 11, -24, 65504);
  const uint16_t sign = std::signbit(v) ? 0x8000 : 0;
  const double a = std::abs(v);
  if (std::isnan(v)) return 0x7e00;
  if (std::isinf(v)) return sign | 0x7c00;
  if (a < std::ldexp(1, -14)) return static_cast<uint16_t>(sign | int(std::ldexp(a, 24)));
  int e = 0;
  std::frexp(a, &e);
  return static_cast<uint16_t>(sign | ((e + 14) << 10) | (int(std::ldexp(a, 11 - e)) - 1024));
}

}  // namespace

std::string name(Type t) {
  static const char* const names[] = {"f32", "f64", "bf16", "f16", "i64",
                                      "i32", "i16", "i8",   "u8",  "bool"};
  return names[static_cast<int>(t)];
}
bool is_float(Type t) { return t <= Type::f16; }
double epsilon(Type t) {
  switch (t) {
    case Type::f32:
      return std::ldexp(1, -24);
    case Type::f64:
      return std::ldexp(1, -53);
    case Type::bf16:
      return std::ldexp(1, -8);
    case Type::f16:
      return std::ldexp(1, -11);
    default:
      return 0;
  }
}
double rounded(Type t, double v) {
  Tensor one(t, {1});
  one.set(0, v);
  return one[0];
}

Dims coordinates(int64_t linear, const Dims& shape) {
  Dims at(shape.size());
  for (size_t i = shape.size(); i-- > 0;) {
    at[i] = linear % shape[i];
    linear /= shape[i];
  }
  return at;
}

Tensor::Tensor(Type type, Dims shape) {
  std::vector<int> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  *this = strided(type, std::move(shape), order);
}

Tensor Tensor::strided(Type type, Dims shape, std::vector<int> order, int64_t gap,
                       std::vector<int> broadcast) {
  Tensor t;
  t.type_ = type;
  t.shape_ = std::move(shape);
  t.stride_.assign(t.shape_.size(), 0);
  int64_t step = 1;
  for (size_t i = order.size(); i-- > 0;) {
    const int axis = order[i];
    if (std::find(broadcast.begin(), broadcast.end(), axis) != broadcast.end()) continue;
    t.stride_[static_cast<size_t>(axis)] = step;
    step = step * std::max<int64_t>(1, t.shape_[static_cast<size_t>(axis)]) + gap;
  }
  t.bytes_.assign(static_cast<size_t>((step + 8) * bytes_of(type)), kGuard);
  return t;
}

Tensor Tensor::scrambled(Type type, Dims shape, std::mt19937& rng) {
  std::vector<int> order(shape.size());
  std::iota(order.begin(), order.end(), 0);
  if (rng() % 2) std::shuffle(order.begin(), order.end(), rng);
  return strided(type, std::move(shape), order, rng() % 3);
}

int64_t Tensor::numel() const {
  return std::accumulate(shape_.begin(), shape_.end(), int64_t{1}, std::multiplies<>());
}
int64_t Tensor::offset(int64_t linear) const {
  int64_t sum = 0;
  for (size_t i = shape_.size(); i-- > 0;) {
    sum += linear % shape_[i] * stride_[i];
    linear /= shape_[i];
  }
  return sum;
}
double Tensor::at(const Dims& where) const {
  int64_t sum = 0;
  for (size_t i = 0; i < shape_.size(); ++i) sum += where[i] * stride_[i];
  return read(sum);
}

double Tensor::read(int64_t element) const {
  const unsigned char* p = bytes_.data() + element * bytes_of(type_);
  switch (type_) {
    case Type::f32:
      return load<float>(p);
    case Type::f64:
      return load<double>(p);
    case Type::f16:
      return half_value(static_cast<uint16_t>(load<uint16_t>(p)));
    case Type::bf16: {
      const uint32_t bits = static_cast<uint32_t>(load<uint16_t>(p)) << 16;
      float f;
      std::memcpy(&f, &bits, 4);
      return f;
    }
    case Type::i64:
      return load<int64_t>(p);
    case Type::i32:
      return load<int32_t>(p);
    case Type::i16:
      return load<int16_t>(p);
    case Type::i8:
      return load<int8_t>(p);
    case Type::u8:
      return load<uint8_t>(p);
    case Type::boolean:
      return *p == 0 ? 0 : *p == 1 ? 1 : NAN;
  }
  return NAN;
}

void Tensor::write(int64_t element, double v) {
  unsigned char* p = bytes_.data() + element * bytes_of(type_);
  switch (type_) {
    case Type::f32:
      return store<float>(p, v);
    case Type::f64:
      return store<double>(p, v);
    case Type::f16: {
      const uint16_t h = half_bits(v);
      std::memcpy(p, &h, 2);
      return;
    }
    case Type::bf16: {
      const auto f = static_cast<float>(round_to(v, 8, -133, 3.3895313892515355e38));
      uint32_t bits;
      std::memcpy(&bits, &f, 4);
      const auto h = static_cast<uint16_t>(bits >> 16);
      std::memcpy(p, &h, 2);
      return;
    }
    case Type::i64:
      return store<int64_t>(p, v);
    case Type::i32:
      return store<int32_t>(p, v);
    case Type::i16:
      return store<int16_t>(p, v);
    case Type::i8:
      return store<int8_t>(p, v);
    case Type::u8:
      return store<uint8_t>(p, v);
    case Type::boolean:
      *p = v != 0;
      return;
  }
}

Tensor& Tensor::fill(const std::function<double(int64_t)>& value) {
  for (int64_t i = 0; i < numel(); ++i) set(i, value(i));
  return *this;
}
Tensor& Tensor::normal(std::mt19937& rng, double scale) {
  std::normal_distribution<double> d(0, scale);
  return fill([&](int64_t) { return is_float(type_) ? d(rng) : std::round(std::abs(d(rng)) * 3); });
}
Tensor& Tensor::integers(std::mt19937& rng, int64_t low, int64_t high) {
  std::uniform_int_distribution<int64_t> d(low, high);
  return fill([&](int64_t) { return static_cast<double>(d(rng)); });
}

bool Tensor::guards_hold() const {
  std::vector<bool> inside(bytes_.size(), false);
  const int64_t width = bytes_of(type_);
  for (int64_t i = 0; i < numel(); ++i) {
    for (int64_t b = 0; b < width; ++b) inside[static_cast<size_t>(offset(i) * width + b)] = true;
  }
  for (size_t i = 0; i < bytes_.size(); ++i) {
    if (!inside[i] && bytes_[i] != kGuard) return false;
  }
  return true;
}

rm_tensor Tensor::view() const {
  rm_tensor t{};
  t.device = {kDLCPU, 0};
  t.ndim = static_cast<int32_t>(shape_.size());
  t.dtype = dl(type_);
  t.shape = const_cast<int64_t*>(shape_.data());
  t.strides = const_cast<int64_t*>(stride_.data());
  return t;
}

Attr integer(std::string n, int64_t v) { return {std::move(n), RM_ATTR_INT, v, 0, {}, {}, {}}; }
Attr real(std::string n, double v) { return {std::move(n), RM_ATTR_FLOAT, 0, v, {}, {}, {}}; }
Attr text(std::string n, std::string v) {
  return {std::move(n), RM_ATTR_STRING, 0, 0, std::move(v), {}, {}};
}
Attr integers(std::string n, std::vector<int64_t> v) {
  return {std::move(n), RM_ATTR_INTS, 0, 0, {}, std::move(v), {}};
}
Attr reals(std::string n, std::vector<double> v) {
  return {std::move(n), RM_ATTR_FLOATS, 0, 0, {}, {}, std::move(v)};
}

rm_backend_query_fn plugin_query() {
  static void* so = dlopen(RM_CPU_PLUGIN, RTLD_NOW | RTLD_LOCAL);
  if (!so) FAIL(dlerror());
  return reinterpret_cast<rm_backend_query_fn>(dlsym(so, RM_BACKEND_QUERY_SYMBOL));
}

const rm_host_api& host() { return kHost; }

std::string isa() {
  const char* set = std::getenv("RM_CPU_ISA");
  return set == nullptr ? "auto" : set;
}

bool refused(rm_status* status) {
  const bool failed = status != nullptr;
  delete status;
  return failed;
}

const rm_backend_api& plugin() {
  static const rm_backend_api* api = [] {
    const rm_backend_api* table = plugin_query()(RM_ABI_VERSION, &kHost);
    const std::string key = "cpu_isa", set = isa();
    const rm_option option{{key.data(), key.size()}, {set.data(), set.size()}};
    if (rm_status* failed = table->initialize({&option, 1})) FAIL(failed->message);
    return table;
  }();
  return *api;
}

std::vector<const rm_kernel*> rows(std::string_view op) {
  const std::string extension = RM_KERNELS_EXTENSION;
  const auto* table =
      static_cast<const rm_kernels*>(plugin().extension({extension.data(), extension.size()}));
  std::vector<const rm_kernel*> out;
  const auto* p = reinterpret_cast<const char*>(table->rows);
  for (size_t i = 0; i < table->count; ++i, p += table->row_stride) {
    const auto* row = reinterpret_cast<const rm_kernel*>(p);
    if (op.empty() || std::string_view(row->op.data, row->op.size) == op) out.push_back(row);
  }
  return out;
}

namespace {

/// A rm_problem and everything it points to.
struct BuiltProblem {
  explicit BuiltProblem(const Call& call) {
    for (const Tensor* t : call.inputs) tensors.push_back(t ? t->view() : rm_tensor{});
    for (const Tensor* t : call.outputs) tensors.push_back(t ? t->view() : rm_tensor{});
    for (size_t i = 0; i < call.inputs.size(); ++i) {
      inputs.push_back(call.inputs[i] ? &tensors[i] : nullptr);
    }
    for (size_t i = 0; i < call.outputs.size(); ++i) {
      outputs.push_back(call.outputs[i] ? &tensors[call.inputs.size() + i] : nullptr);
    }
    for (const Attr& a : call.attrs) {
      rm_attr out{};
      out.struct_size = sizeof out;
      out.name = {a.name.data(), a.name.size()};
      out.kind = a.kind;
      out.i = a.i;
      out.f = a.f;
      out.s = {a.s.data(), a.s.size()};
      out.ints = a.ints.data();
      out.floats = a.floats.data();
      out.count = a.kind == RM_ATTR_INTS ? a.ints.size() : a.floats.size();
      attrs.push_back(out);
    }
    problem.struct_size = sizeof problem;
    problem.op = {call.op.data(), call.op.size()};
    problem.inputs = inputs.data();
    problem.num_inputs = inputs.size();
    problem.outputs = outputs.data();
    problem.num_outputs = outputs.size();
    problem.attrs = attrs.data();
    problem.num_attrs = attrs.size();
    problem.attr_stride = sizeof(rm_attr);
  }
  std::vector<rm_tensor> tensors;
  std::vector<const rm_tensor*> inputs, outputs;
  std::vector<rm_attr> attrs;
  rm_problem problem{};
};

Outcome take(rm_status* s) {
  if (!s) return {};
  Outcome out{s->code, s->message};
  delete s;
  return out;
}

}  // namespace

bool supports(const rm_kernel& row, const Call& call) {
  const BuiltProblem built(call);
  rm_str why{};
  return row.supports(&built.problem, nullptr, &why) != 0;
}

Outcome run(const rm_kernel& row, const Call& call, uint64_t constants) {
  BuiltProblem built(call);
  built.problem.constant_inputs = constants;
  rm_kernel_state* state = nullptr;
  Outcome prepared = take(row.prepare(&built.problem, nullptr, 0, &state));
  if (prepared.code != RM_OK) return prepared;
  const uint64_t bytes = row.workspace ? row.workspace(state) : 0;
  // Hardly more than the bytes asked for, so that AddressSanitizer sees a workspace that is too small;
  // nothing in it is zero, and what lies behind them must stay as it is.
  constexpr unsigned char kMarker = 0xa5;
  const uint64_t room = (bytes + 127) / 64 * 64;
  std::unique_ptr<char, decltype(&std::free)> workspace(
      static_cast<char*>(std::aligned_alloc(64, room)), &std::free);
  std::memset(workspace.get(), kMarker, room);
  std::vector<const void*> inputs;
  std::vector<void*> outputs;
  for (const Tensor* t : call.inputs) inputs.push_back(t ? t->data() : nullptr);
  for (Tensor* t : call.outputs) outputs.push_back(t ? t->data() : nullptr);
  std::vector<std::unique_ptr<char, decltype(&std::free)>> packed;
  for (size_t i = 0; i < inputs.size() && row.packing; ++i) {
    rm_packing packing{};
    if (constants >> i & 1) row.packing(state, i, &packing);
    if (packing.bytes == 0) continue;
    const uint64_t alignment = std::max<uint64_t>(packing.alignment, 64);
    packed.emplace_back(static_cast<char*>(std::aligned_alloc(
                            alignment, (packing.bytes + alignment - 1) / alignment * alignment)),
                        &std::free);
    rm_tensor source = built.tensors[i];
    source.data = const_cast<void*>(inputs[i]);
    const Outcome out = take(row.prepack(state, i, &source, packed.back().get()));
    if (out.code != RM_OK) return out;
    inputs[i] = packed.back().get();
  }
  rm_launch launch{sizeof(rm_launch), state,           inputs.data(),
                   outputs.data(),    workspace.get(), nullptr};
  Outcome out = take(row.launch(&launch));
  row.release(state);
  for (uint64_t i = bytes; i < room; ++i) {
    if (static_cast<unsigned char>(workspace.get()[i]) == kMarker) continue;
    FAIL_CHECK(call.op << " wrote behind its workspace");
    break;
  }
  for (const Tensor* t : call.outputs) {
    if (t) CHECK_MESSAGE(t->guards_hold(), call.op << " wrote outside its result");
  }
  return out;
}

void on_every_row(const Call& call, const std::function<void(const std::string&)>& check,
                  uint64_t constants) {
  int taken = 0;
  for (const rm_kernel* row : rows(call.op)) {
    if (!supports(*row, call)) continue;
    ++taken;
    const std::string name(row->name.data, row->name.size);
    CAPTURE(name);
    for (Tensor* t : call.outputs) {
      if (t) t->fill([](int64_t) { return 77; });
    }
    const Outcome out = run(*row, call, constants);
    CAPTURE(out.message);
    REQUIRE(out.code == RM_OK);
    check(name);
  }
  CHECK_MESSAGE(taken > 0, "no row takes " << call.op);
}

bool close(double got, double want, double relative, double absolute) {
  if (std::isnan(want)) return std::isnan(got);
  if (std::isinf(want)) return got == want;
  return std::abs(got - want) <= relative * std::abs(want) + absolute;
}

}  // namespace rm::test
