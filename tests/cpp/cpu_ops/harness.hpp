// Runs kernel rows of the built CPU plugin on tensors with hostile strides, through the C ABI only.
//
// A Tensor owns more memory than it addresses; guards_hold() tells whether a kernel wrote to an
// element outside the view.
#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "rm/kernels.h"

namespace rm::test {

enum class Type { f32, f64, bf16, f16, i64, i32, i16, i8, u8, boolean };
inline const std::vector<Type> kFloats = {Type::f32, Type::bf16, Type::f16, Type::f64};
inline const std::vector<Type> kAll = {Type::f32, Type::f64, Type::bf16, Type::f16, Type::i64,
                                       Type::i32, Type::i16, Type::i8,   Type::u8,  Type::boolean};
std::string name(Type t);
bool is_float(Type t);
/// Largest relative error of one rounding to t: 2^-p for p significant bits.
double epsilon(Type t);
/// The value as it comes back from storage of type t.
double rounded(Type t, double v);

using Dims = std::vector<int64_t>;

class Tensor {
 public:
  /// Dense.
  Tensor(Type type, Dims shape);
  /// Memory laid out in `order` of axes with `gap` unused elements behind each row; axes named in
  /// `broadcast` get stride 0.
  static Tensor strided(Type type, Dims shape, std::vector<int> order, int64_t gap = 0,
                        std::vector<int> broadcast = {});
  /// A random layout.
  static Tensor scrambled(Type type, Dims shape, std::mt19937& rng);

  int64_t numel() const;
  const Dims& shape() const { return shape_; }
  Type type() const { return type_; }
  double operator[](int64_t linear) const { return read(offset(linear)); }
  double at(const Dims& where) const;
  void set(int64_t linear, double v) { write(offset(linear), v); }
  Tensor& fill(const std::function<double(int64_t)>& value);
  Tensor& normal(std::mt19937& rng, double scale = 1.0);
  Tensor& integers(std::mt19937& rng, int64_t low, int64_t high);

  bool guards_hold() const;
  rm_tensor view() const;
  void* data() { return bytes_.data(); }
  const void* data() const { return bytes_.data(); }

 private:
  Tensor() = default;
  int64_t offset(int64_t linear) const;
  double read(int64_t element) const;
  void write(int64_t element, double v);

  Type type_ = Type::f32;
  Dims shape_, stride_;
  std::vector<unsigned char> bytes_;
};

Dims coordinates(int64_t linear, const Dims& shape);

struct Attr {
  std::string name;
  rm_attr_kind kind;
  int64_t i = 0;
  double f = 0;
  std::string s;
  std::vector<int64_t> ints;
  std::vector<double> floats;
};
Attr integer(std::string name, int64_t v);
Attr real(std::string name, double v);
Attr text(std::string name, std::string v);
Attr integers(std::string name, std::vector<int64_t> v);
Attr reals(std::string name, std::vector<double> v);

struct Call {
  std::string op;
  std::vector<const Tensor*> inputs;  // nullptr = absent
  std::vector<Tensor*> outputs;
  std::vector<Attr> attrs;
};

rm_backend_query_fn plugin_query();
const rm_host_api& host();
std::string isa();  // RM_CPU_ISA: the instruction sets that rows may use
const rm_backend_api& plugin();
std::vector<const rm_kernel*> rows(std::string_view op);

struct Outcome {
  rm_code code = RM_OK;
  std::string message;
};
/// Whether the row takes the call.
bool supports(const rm_kernel& row, const Call& call);
/// Whether a call of the plugin failed. Frees the status, which belongs to the host.
bool refused(rm_status* status);

/// prepare, launch, release; checks the guards of every output. `constants` has a bit for each
/// input that is one: the row gets it in its own layout where it has one.
Outcome run(const rm_kernel& row, const Call& call, uint64_t constants = 0);

/// Runs `check` after every row of the operator that takes the call; the outputs are refilled with
/// a marker before each. Fails when no row takes it.
void on_every_row(const Call& call, const std::function<void(const std::string& row)>& check,
                  uint64_t constants = 0);

/// |got - want| <= relative * |want| + absolute, NaN equals NaN, Inf equals the same Inf.
bool close(double got, double want, double relative, double absolute);

}  // namespace rm::test
