// View algebra; the reshape rule is numpy's: merge or split runs of axes that lie densely.
#include "ir/layout.hpp"

#include <algorithm>

#include "base/error.hpp"
#include "ir/byte_count.hpp"

namespace rm::ir {

bool Layout::is_empty() const { return std::find(dims.begin(), dims.end(), 0) != dims.end(); }

int64_t Layout::num_elements() const { return ir::num_elements(dims); }

int64_t Layout::num_bytes() const { return ir::num_bytes(dims, dtype); }

bool Layout::is_contiguous() const {
  int64_t expected = 1;
  for (size_t i = dims.size(); i-- > 0;) {
    if (dims[i] == 0) return true;
    if (dims[i] != 1 && strides[i] != expected) return is_empty();
    if (__builtin_mul_overflow(expected, dims[i], &expected)) return is_empty();
  }
  return true;
}

Ints contiguous_strides(const Ints& dims) {
  Ints strides(dims.size(), 1);
  for (size_t i = dims.size(); i-- > 1;) {
    if (!__builtin_mul_overflow(strides[i], dims[i] > 0 ? dims[i] : 1, &strides[i - 1])) continue;
    if (std::find(dims.begin(), dims.end(), 0) != dims.end()) return Ints(dims.size(), 1);
    num_elements(dims);  // says what is wrong with them
  }
  return strides;
}

Ints static_dims(const Dims& dims) {
  Ints out;
  out.reserve(dims.size());
  for (const Dim& d : dims) out.push_back(d.value());
  return out;
}

Layout contiguous(DType dtype, Ints dims) {
  Ints strides = contiguous_strides(dims);
  return {dtype, std::move(dims), std::move(strides), 0};
}

Layout contiguous(const TensorType& type) { return contiguous(type.dtype, static_dims(type.dims)); }

std::optional<Layout> view_reshape(const Layout& layout, const Ints& dims) {
  if (layout.is_contiguous()) {
    return Layout{layout.dtype, dims, contiguous_strides(dims), layout.offset};
  }
  // Walk both shapes in groups of equal element count; the old axes of a group must be dense.
  Ints old_dims, old_strides;
  for (size_t i = 0; i < layout.dims.size(); ++i) {
    if (layout.dims[i] != 1) {
      old_dims.push_back(layout.dims[i]);
      old_strides.push_back(layout.strides[i]);
    }
  }
  Ints strides(dims.size(), 0);
  size_t oi = 0, ni = 0;
  while (oi < old_dims.size() && ni < dims.size()) {
    size_t oj = oi + 1, nj = ni + 1;
    int64_t op = old_dims[oi], np = dims[ni];
    while (op != np) {
      if (op < np) {
        if (oj >= old_dims.size()) return std::nullopt;
        if (__builtin_mul_overflow(op, old_dims[oj++], &op)) return std::nullopt;
      } else {
        if (nj >= dims.size()) return std::nullopt;
        if (__builtin_mul_overflow(np, dims[nj++], &np)) return std::nullopt;
      }
    }
    for (size_t k = oi; k + 1 < oj; ++k) {
      if (old_strides[k] != old_strides[k + 1] * old_dims[k + 1]) return std::nullopt;
    }
    int64_t stride = old_strides[oj - 1];
    for (size_t k = nj; k-- > ni;) {
      strides[k] = stride;
      if (__builtin_mul_overflow(stride, dims[k], &stride)) return std::nullopt;
    }
    oi = oj;
    ni = nj;
  }
  for (; ni < dims.size(); ++ni) {
    if (dims[ni] != 1) return std::nullopt;
    strides[ni] = 1;
  }
  return Layout{layout.dtype, dims, strides, layout.offset};
}

Layout view_permute(const Layout& layout, const Ints& axes) {
  Layout out{layout.dtype, {}, {}, layout.offset};
  for (int64_t a : axes) {
    out.dims.push_back(layout.dims.at(static_cast<size_t>(a)));
    out.strides.push_back(layout.strides.at(static_cast<size_t>(a)));
  }
  return out;
}

Layout view_expand(const Layout& layout, const Ints& dims) {
  if (dims.size() < layout.dims.size()) {
    throw_invalid("[expand] expected a rank of at least " + std::to_string(layout.dims.size()) +
                  ", got " + std::to_string(dims.size()));
  }
  Layout out{layout.dtype, dims, Ints(dims.size(), 0), layout.offset};
  size_t lead = dims.size() - layout.dims.size();
  for (size_t i = 0; i < layout.dims.size(); ++i) {
    if (layout.dims[i] == dims[lead + i]) {
      out.strides[lead + i] = layout.strides[i];
    } else if (layout.dims[i] != 1) {
      throw_invalid("[expand] expected dimension " + std::to_string(layout.dims[i]) +
                    " or 1, got " + std::to_string(dims[lead + i]));
    }
  }
  return out;
}

Layout view_slice(const Layout& layout, size_t axis, int64_t start, int64_t stop, int64_t step) {
  Layout out = layout;
  if (axis >= layout.dims.size() || start < 0 || start > stop || stop > layout.dims[axis] ||
      step < 1) {
    throw_invalid("[slice] expected 0 <= start <= stop <= dim and step > 0, got " +
                  std::to_string(start) + ":" + std::to_string(stop) + ":" + std::to_string(step));
  }
  // A view of one element needs no stride, so no product is larger than the memory viewed.
  out.dims[axis] = start == stop ? 0 : (stop - start - 1) / step + 1;
  if (out.dims[axis] > 0) out.offset += start * layout.strides[axis];
  if (out.dims[axis] > 1) out.strides[axis] *= step;
  return out;
}

}  // namespace rm::ir
