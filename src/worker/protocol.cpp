// Encoding of the message bodies, field by field in the order of the structs.
#include "worker/protocol.hpp"

#include "worker/wire.hpp"

namespace rm::worker {
namespace {

constexpr size_t kMinSlotBytes = 42;

void write(Writer& out, const Slots& slots) {
  out.u64(slots.size());
  for (const TensorSlot& slot : slots) {
    out.bytes(slot.name).u8(slot.dtype.code).u8(slot.dtype.bits).u64(slot.dims.size());
    for (const int64_t dim : slot.dims) out.u64(static_cast<uint64_t>(dim));
    out.u64(slot.offset).u64(slot.bytes).bytes(slot.digest);
  }
}

Slots read_slots(Reader& in) {
  Slots slots(in.count(kMinSlotBytes));
  for (TensorSlot& slot : slots) {
    slot.name = in.bytes();
    slot.dtype.code = in.u8();
    slot.dtype.bits = in.u8();
    slot.dtype.lanes = 1;
    slot.dims.resize(in.count(8));
    for (int64_t& dim : slot.dims) dim = static_cast<int64_t>(in.u64());
    slot.offset = in.u64();
    slot.bytes = in.u64();
    slot.digest = in.bytes();
  }
  return slots;
}

}  // namespace

uint64_t tensor_bytes(DLDataType dtype, const std::vector<int64_t>& dims) {
  constexpr uint64_t kMost = uint64_t{1} << 62;
  uint64_t bytes = (uint64_t{dtype.bits} + 7) / 8;
  bool empty = false;
  for (const int64_t dim : dims) {
    if (dim < 0)
      throw Error(RM_DATA_LOSS, "[worker] expected sizes >= 0, got a negative one", "RM303");
    if (dim == 0) {
      empty = true;
    } else if (bytes > kMost / static_cast<uint64_t>(dim)) {
      throw Error(RM_DATA_LOSS, "[worker] expected a tensor that fits memory, got a larger one",
                  "RM303");
    } else {
      bytes *= static_cast<uint64_t>(dim);
    }
  }
  return empty ? 0 : bytes;
}

void TensorSlot::check(uint64_t memory_bytes) const {
  if (tensor_bytes(dtype, dims) != bytes || offset > memory_bytes ||
      bytes > memory_bytes - offset) {
    throw Error(RM_DATA_LOSS,
                "[worker] expected tensor '" + name + "' inside " + std::to_string(memory_bytes) +
                    " bytes, got " + std::to_string(bytes) + " at " + std::to_string(offset),
                "RM303");
  }
}

std::string Ready::encode() const {
  Writer out;
  return out.u64(pid).bytes(backend).bytes(version).bytes(build_id).bytes(fingerprint).take();
}

Ready Ready::decode(std::string_view bytes) {
  Reader in(bytes);
  Ready out;
  out.pid = in.u64();
  out.backend = in.bytes();
  out.version = in.bytes();
  out.build_id = in.bytes();
  out.fingerprint = in.bytes();
  in.end();
  return out;
}

std::string CompileRequest::encode() const {
  Writer out;
  out.u64(device).bytes(program).u64(options.size());
  for (const auto& [key, value] : options) out.bytes(key).bytes(value);
  write(out, constants);
  return out.take();
}

CompileRequest CompileRequest::decode(std::string_view bytes) {
  Reader in(bytes);
  CompileRequest out;
  out.device = in.u64();
  out.program = in.bytes();
  out.options.resize(in.count(16));
  for (auto& [key, value] : out.options) {
    key = in.bytes();
    value = in.bytes();
  }
  out.constants = read_slots(in);
  in.end();
  return out;
}

std::string LoadRequest::encode() const {
  Writer out;
  out.u64(device).bytes(artefact);
  write(out, constants);
  write(out, inputs);
  write(out, outputs);
  write(out, states);
  out.u64(file_offset).u64(file_bytes);
  return out.take();
}

LoadRequest LoadRequest::decode(std::string_view bytes) {
  Reader in(bytes);
  LoadRequest out;
  out.device = in.u64();
  out.artefact = in.bytes();
  out.constants = read_slots(in);
  out.inputs = read_slots(in);
  out.outputs = read_slots(in);
  out.states = read_slots(in);
  out.file_offset = in.u64();
  out.file_bytes = in.u64();
  in.end();
  return out;
}

std::string StatesRequest::encode() const {
  Writer out;
  out.u64(device);
  write(out, slots);
  return out.take();
}

StatesRequest StatesRequest::decode(std::string_view bytes) {
  Reader in(bytes);
  StatesRequest out;
  out.device = in.u64();
  out.slots = read_slots(in);
  in.end();
  return out;
}

std::string CopyStatesRequest::encode() const {
  Writer out;
  out.u64(from).u64(to).u64(region.axis).u64(region.from_start).u64(region.to_start);
  out.u64(region.count).u64(region.rows.size());
  for (const uint64_t row : region.rows) out.u64(row);
  write(out, host);
  return out.take();
}

CopyStatesRequest CopyStatesRequest::decode(std::string_view bytes) {
  Reader in(bytes);
  CopyStatesRequest out;
  out.from = in.u64();
  out.to = in.u64();
  out.region.axis = in.u64();
  out.region.from_start = in.u64();
  out.region.to_start = in.u64();
  out.region.count = in.u64();
  out.region.rows.resize(in.count(8));
  for (uint64_t& row : out.region.rows) row = in.u64();
  out.host = read_slots(in);
  in.end();
  return out;
}

std::string Progress::encode() const {
  Writer out;
  return out.f64(fraction).bytes(stage).take();
}

Progress Progress::decode(std::string_view bytes) {
  Reader in(bytes);
  Progress out;
  out.fraction = in.f64();
  out.stage = in.bytes();
  in.end();
  return out;
}

std::string Failure::encode() const {
  Writer out;
  return out.u32(code).bytes(reason).bytes(message).take();
}

Failure Failure::decode(std::string_view bytes) {
  Reader in(bytes);
  Failure out;
  out.code = in.u32();
  out.reason = in.bytes();
  out.message = in.bytes();
  in.end();
  return out;
}

Error Failure::error(const std::string& where, const std::string& more) const {
  const bool known = code > RM_OK && code <= RM_DATA_LOSS;
  return Error(known ? static_cast<rm_code>(code) : RM_UNKNOWN, "[" + where + "] " + message + more,
               reason);
}

}  // namespace rm::worker
