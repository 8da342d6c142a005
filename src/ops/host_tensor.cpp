// Element conversion and strided offsets of host tensors. Clarity over speed: these are oracles.
#include "ops/host_tensor.hpp"

#include <cstring>

#include "ir/scalar.hpp"

namespace rm::ops {

HostTensor zeros(const ir::TensorType& type) {
  return {type, std::string(static_cast<size_t>(type.num_bytes()), '\0')};
}

std::vector<double> to_doubles(const HostTensor& tensor) {
  std::vector<double> out(static_cast<size_t>(tensor.size()));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = ir::load_element(tensor.type.dtype, tensor.at(static_cast<int64_t>(i)));
  }
  return out;
}

std::vector<int64_t> to_ints(const HostTensor& tensor) {
  std::vector<int64_t> out(static_cast<size_t>(tensor.size()));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = ir::load_int(tensor.type.dtype, tensor.at(static_cast<int64_t>(i)));
  }
  return out;
}

HostTensor from_doubles(const ir::TensorType& type, const std::vector<double>& values) {
  HostTensor out = zeros(type);
  for (size_t i = 0; i < values.size(); ++i) {
    ir::store_element(type.dtype, out.at(static_cast<int64_t>(i)), values[i]);
  }
  return out;
}

HostTensor from_ints(const ir::TensorType& type, const std::vector<int64_t>& values) {
  HostTensor out = zeros(type);
  for (size_t i = 0; i < values.size(); ++i) {
    ir::store_int(type.dtype, out.at(static_cast<int64_t>(i)), values[i]);
  }
  return out;
}

std::vector<int64_t> sizes(const ir::Dims& dims) {
  std::vector<int64_t> out;
  for (const auto& d : dims) out.push_back(d.value());
  return out;
}

std::vector<int64_t> contiguous_strides(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> strides(sizes.size(), 1);
  for (size_t i = sizes.size(); i-- > 1;) strides[i - 1] = strides[i] * sizes[i];
  return strides;
}

std::vector<int64_t> strided_offsets(const std::vector<int64_t>& sizes,
                                     const std::vector<int64_t>& strides, int64_t base) {
  int64_t total = 1;
  for (int64_t s : sizes) total *= s;
  std::vector<int64_t> out;
  out.reserve(static_cast<size_t>(total));
  std::vector<int64_t> coords(sizes.size(), 0);
  int64_t offset = base;
  for (int64_t i = 0; i < total; ++i) {
    out.push_back(offset);
    for (size_t d = sizes.size(); d-- > 0;) {
      offset += strides[d];
      if (++coords[d] < sizes[d]) break;
      offset -= strides[d] * sizes[d];
      coords[d] = 0;
    }
  }
  return out;
}

std::vector<int64_t> broadcast_offsets(const ir::Dims& from, const ir::Dims& to) {
  std::vector<int64_t> shape = sizes(to), own = sizes(from);
  std::vector<int64_t> own_strides = contiguous_strides(own);
  std::vector<int64_t> strides(shape.size(), 0);
  for (size_t i = 0; i < own.size(); ++i) {
    if (own[i] != 1) strides[shape.size() - own.size() + i] = own_strides[i];
  }
  return strided_offsets(shape, strides);
}

HostTensor take(const HostTensor& source, const ir::TensorType& result,
                const std::vector<int64_t>& offsets) {
  HostTensor out = zeros(result);
  size_t item = ir::size_bytes(result.dtype);
  for (size_t i = 0; i < offsets.size(); ++i) {
    std::memcpy(out.at(static_cast<int64_t>(i)), source.at(offsets[i]), item);
  }
  return out;
}

AxisSplit split_at(const ir::Dims& dims, size_t axis) {
  AxisSplit split{1, dims[axis].value(), 1};
  for (size_t i = 0; i < dims.size(); ++i) {
    if (i < axis) split.outer *= dims[i].value();
    if (i > axis) split.inner *= dims[i].value();
  }
  return split;
}

}  // namespace rm::ops
