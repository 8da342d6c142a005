// Dtypes and the tensor descriptor of the CUDA operator modules: plain data, no ownership.
// An optional operand is a null pointer to Tensor; a zero-size tensor may have null data.
#pragma once

#include <cstdint>

namespace rm::cuda_ops {

enum class DType : std::uint8_t { f32, f64, bf16, f16, i64, i32, i16, i8, u8, boolean };

inline constexpr int kMaxRank = 8;

struct Tensor {
  void* data = nullptr;  // first element, device memory
  DType dtype = DType::f32;
  int rank = 0;
  std::int64_t shape[kMaxRank] = {};
  std::int64_t stride[kMaxRank] = {};  // in elements; 0 = broadcast
};

inline int size_of(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64:
      return 8;
    case DType::f32:
    case DType::i32:
      return 4;
    case DType::bf16:
    case DType::f16:
    case DType::i16:
      return 2;
    default:
      return 1;
  }
}

inline const char* name_of(DType t) {
  constexpr const char* kNames[] = {"float32", "float64", "bfloat16", "float16", "int64",
                                    "int32",   "int16",   "int8",     "uint8",   "bool"};
  return kNames[static_cast<int>(t)];
}

/// What the fast kernels take: fp32, bf16 and fp16 (accumulated in fp32).
inline bool is_float(DType t) { return t == DType::f32 || t == DType::bf16 || t == DType::f16; }

inline std::int64_t numel(const Tensor& t) {
  std::int64_t n = 1;
  for (int i = 0; i < t.rank; ++i) n *= t.shape[i];
  return n;
}

inline bool same_shape(const Tensor& a, const Tensor& b) {
  if (a.rank != b.rank) return false;
  for (int i = 0; i < a.rank; ++i) {
    if (a.shape[i] != b.shape[i]) return false;
  }
  return true;
}

inline bool is_contiguous(const Tensor& t) {
  std::int64_t expected = 1;
  for (int i = t.rank - 1; i >= 0; --i) {
    if (t.shape[i] != 1 && t.stride[i] != expected) return false;
    expected *= t.shape[i];
  }
  return true;
}

/// Start and row pitch fall on `bytes`: a row of such a tensor may be read in vectors.
inline bool is_aligned(const void* data, std::int64_t pitch_elements, DType t, int bytes) {
  return reinterpret_cast<std::uintptr_t>(data) % bytes == 0 &&
         pitch_elements * size_of(t) % bytes == 0;
}

/// A tensor seen as rows of its last axis: [rows, n] with one pitch.
struct Rows {
  std::int64_t rows = 1, n = 1, pitch = 0;  // in elements
  bool valid = false;                       // the leading axes collapse and the last one is dense
};

inline Rows rows_of(const Tensor& t) {
  Rows out;
  if (t.rank == 0) return out;
  out.n = t.shape[t.rank - 1];
  out.valid = out.n <= 1 || t.stride[t.rank - 1] == 1;
  std::int64_t expected = -1;  // stride the next outer axis must have
  out.pitch = out.n;
  for (int i = t.rank - 2; i >= 0; --i) {
    if (t.shape[i] == 1) continue;
    if (expected < 0) {
      out.pitch = t.stride[i];
    } else if (t.stride[i] != expected && out.rows != 0) {
      out.valid = false;
    }
    out.rows *= t.shape[i];
    expected = t.stride[i] * t.shape[i];
  }
  return out;
}

/// Makes leading axes rows of a matrix; false, and nothing, where they are not of one pitch.
inline bool fold_rows(Tensor& t) {
  const Rows r = rows_of(t);
  if (t.rank == 0 || !r.valid) return false;
  t.rank = 2;
  t.shape[0] = r.rows, t.shape[1] = r.n;
  t.stride[0] = r.pitch, t.stride[1] = 1;
  return true;
}

}  // namespace rm::cuda_ops
