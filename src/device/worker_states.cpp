// Copies go through the plugin's own `copy`, as views with strides of the two tensors.
#include "device/worker_states.hpp"

#include <algorithm>
#include <cstddef>

#include "base/error.hpp"

namespace rm::device {
namespace {

/// A window of a contiguous tensor; addresses are stable while the object lives.
class Window {
 public:
  Window(DLDevice device, void* data, const worker::TensorSlot& slot) : dims_(slot.dims) {
    strides_.resize(dims_.size());
    int64_t stride = 1;
    for (size_t i = dims_.size(); i-- > 0; stride *= dims_[i]) strides_[i] = stride;
    view_.data = data;
    view_.device = device;
    view_.ndim = static_cast<int32_t>(dims_.size());
    view_.dtype = slot.dtype;
    view_.shape = dims_.data();
    view_.strides = strides_.data();
  }
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;

  int64_t dim(size_t axis) const { return dims_[axis]; }
  void narrow(size_t axis, int64_t start, int64_t count) {
    const auto bytes = static_cast<int64_t>((view_.dtype.bits + 7) / 8);
    view_.byte_offset += static_cast<uint64_t>(start * strides_[axis] * bytes);
    dims_[axis] = count;
  }
  rm_tensor& get() { return view_; }

 private:
  std::vector<int64_t> dims_, strides_;
  rm_tensor view_{};
};

[[noreturn]] void reject(const char* what) {
  throw Error(RM_DATA_LOSS, std::string("[worker states] expected ") + what, "RM303");
}

/// One side of a copy: the tensors of a set, or of the client's memory.
class Side {
 public:
  Side(const worker::States* states, const worker::MappedTensors& host)
      : states_(static_cast<const BackendStates*>(states)), host_(host) {
    if (states_ != nullptr) {
      const rm_device_info& info = states_->backend().get_device_info(states_->device());
      device_ = {static_cast<DLDeviceType>(info.dl_device_type), info.dl_device_id};
    }
  }
  size_t size() const { return states_ != nullptr ? states_->tensors().size() : host_.size(); }
  const worker::TensorSlot& slot(size_t i) const {
    return states_ != nullptr ? states_->tensors()[i].slot : *host_[i].slot;
  }
  Window window(size_t i) const {
    return {device_, states_ != nullptr ? states_->tensors()[i].buffer.data() : host_[i].data,
            slot(i)};
  }

 private:
  const BackendStates* states_;
  const worker::MappedTensors& host_;
  DLDevice device_{kDLCPU, 0};
};

void check_alike(const worker::TensorSlot& a, const worker::TensorSlot& b, size_t axis) {
  const bool same_type = a.dtype.code == b.dtype.code && a.dtype.bits == b.dtype.bits;
  if (!same_type || a.dims.size() != b.dims.size() || axis >= a.dims.size()) {
    reject("two tensors of the same type and rank");
  }
  for (size_t i = 1; i < a.dims.size(); ++i) {
    if (i != axis && a.dims[i] != b.dims[i]) reject("tensors that differ along the region's axes");
  }
}

/// Narrows both windows to `count` elements of an axis, as far as both reach.
void narrow(Window& from, Window& to, size_t axis, uint64_t from_start, uint64_t to_start,
            uint64_t count) {
  const auto has = [axis](const Window& window, uint64_t start) {
    const auto size = static_cast<uint64_t>(window.dim(axis));
    return start > size ? uint64_t{0} : size - start;
  };
  const uint64_t fits = std::min({count, has(from, from_start), has(to, to_start)});
  from.narrow(axis, fits == 0 ? 0 : static_cast<int64_t>(from_start), static_cast<int64_t>(fits));
  to.narrow(axis, fits == 0 ? 0 : static_cast<int64_t>(to_start), static_cast<int64_t>(fits));
}

}  // namespace

BackendStates::BackendStates(Backend& backend, size_t device, const worker::Slots& slots)
    : backend_(backend), device_(device) {
  const size_t alignment = std::max<size_t>(backend.get_device_info(device).alignment, 64);
  backend::Stream stream = backend.create_stream(device, 0);
  for (const worker::TensorSlot& slot : slots) {
    tensors_.push_back({slot, backend.allocate(device, 0, slot.bytes, alignment)});
    std::vector<std::byte> zeros(slot.bytes);
    const worker::MappedTensors host{{&slot, zeros.data()}};
    Window from = Side(nullptr, host).window(0);
    Window to = Side(this, {}).window(tensors_.size() - 1);
    if (slot.bytes > 0) backend.copy(stream.get(), from.get(), to.get());
    stream.synchronize();
  }
}

std::vector<rm_state_handle> BackendStates::handles(const worker::Slots& wanted) const {
  std::vector<rm_state_handle> out;
  for (const worker::TensorSlot& slot : wanted) {
    const auto at = std::find_if(tensors_.begin(), tensors_.end(), [&](const StateTensor& tensor) {
      return tensor.slot.name == slot.name && tensor.slot.dims == slot.dims &&
             tensor.slot.dtype.code == slot.dtype.code && tensor.slot.dtype.bits == slot.dtype.bits;
    });
    if (at == tensors_.end()) reject("the states the program was loaded for");
    out.push_back({{at->slot.name.data(), at->slot.name.size()}, at->buffer.get()});
  }
  return out;
}

void copy_states(const worker::CopyJob& job) {
  const Side from(job.from, job.host), to(job.to, job.host);
  const auto* states = static_cast<const BackendStates*>(job.to ? job.to : job.from);
  if (from.size() != to.size()) reject("as many tensors on both sides");
  backend::Stream stream = states->backend().create_stream(states->device(), 0);
  const worker::StatesRegion& region = job.region;
  const auto copy = [&](size_t tensor, uint64_t from_row, uint64_t to_row, uint64_t rows) {
    Window source = from.window(tensor), target = to.window(tensor);
    narrow(source, target, 0, from_row, to_row, rows);
    if (region.axis > 0) {
      narrow(source, target, region.axis, region.from_start, region.to_start, region.count);
    }
    if (source.dim(0) > 0 && source.dim(region.axis) > 0) {
      states->backend().copy(stream.get(), source.get(), target.get());
    }
  };
  for (size_t i = 0; i < from.size(); ++i) {
    check_alike(from.slot(i), to.slot(i), region.axis);
    if (region.rows.empty()) copy(i, 0, 0, UINT64_MAX);
    const auto rows = static_cast<uint64_t>(from.slot(i).dims[0]);
    for (const uint64_t row : region.rows) {
      if (row >= rows) reject("rows the source has");
    }
    for (size_t row = 0; row < region.rows.size(); ++row) copy(i, region.rows[row], row, 1);
  }
  stream.synchronize();
}

}  // namespace rm::device
