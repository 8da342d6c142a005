// Field numbers are those of onnx.proto.
#include "onnx/model.hpp"

#include <cstring>

#include "base/error.hpp"
#include "onnx/wire.hpp"

namespace rm::onnx {
namespace {

[[noreturn]] void damaged(const std::string& message) {
  throw Error(RM_INVALID_ARGUMENT, "[onnx] expected " + message + "; try writing the file again",
              "RM340");
}

void read_external(std::string_view bytes, Tensor* tensor) {
  Field f;
  std::string key, value;
  for (Message m(bytes); m.next(&f);) {
    if (f.number == 1) key = f.name();
    if (f.number == 2) value = f.name();
  }
  tensor->external[key] = value;
}

Tensor read_tensor(std::string_view bytes) {
  Tensor t;
  Field f;
  for (Message m(bytes); m.next(&f);) {
    switch (f.number) {
      case 1:
        append_integers(f, &t.dims);
        break;
      case 2:
        t.dtype = f.integer();
        break;
      case 4:
        append_floats(f, &t.reals);
        break;
      case 5:
      case 7:
      case 11:
        append_integers(f, &t.integers);
        break;
      case 8:
        t.name = f.name();
        break;
      case 9:
        t.raw = f.text();
        break;
      case 10:
        append_doubles(f, &t.reals);
        break;
      case 13:
        read_external(f.text(), &t);
        break;
      case 14:
        t.is_external = f.integer() == 1;
        break;
      default:
        break;
    }
  }
  return t;
}

Attribute read_attribute(std::string_view bytes, std::string* name) {
  Attribute a;
  Field f;
  for (Message m(bytes); m.next(&f);) {
    switch (f.number) {
      case 1:
        *name = f.name();
        break;
      case 2:
        a.real = static_cast<double>(f.real());
        break;
      case 3:
        a.integer = f.integer();
        break;
      case 4:
        a.text = f.name();
        break;
      case 5:
        a.tensor = read_tensor(f.text());
        break;
      case 6:
        a.graph = f.text();
        a.has_graph = true;
        break;
      case 7:
        append_floats(f, &a.reals);
        break;
      case 8:
        append_integers(f, &a.integers);
        break;
      case 20:
        a.kind = f.integer();
        break;
      case 21:
        a.reference = f.name();
        break;
      default:
        break;
    }
  }
  return a;
}

Node read_node(std::string_view bytes) {
  Node n;
  Field f;
  for (Message m(bytes); m.next(&f);) {
    switch (f.number) {
      case 1:
        n.inputs.push_back(f.name());
        break;
      case 2:
        n.outputs.push_back(f.name());
        break;
      case 3:
        n.name = f.name();
        break;
      case 4:
        n.op = f.name();
        break;
      case 5: {
        std::string name;
        Attribute a = read_attribute(f.text(), &name);
        n.attributes[name] = std::move(a);
        break;
      }
      case 7:
        n.domain = f.name();
        break;
      default:
        break;
    }
  }
  return n;
}

Size read_size(std::string_view bytes) {
  Size s;
  Field f;
  for (Message m(bytes); m.next(&f);) {
    if (f.number == 1) s.value = f.integer();
    if (f.number == 2) s.name = f.name();
  }
  return s;
}

void read_tensor_type(std::string_view bytes, Port* port) {
  Field f, g;
  for (Message m(bytes); m.next(&f);) {
    if (f.number == 1) port->dtype = f.integer();
    if (f.number != 2) continue;
    port->has_shape = true;
    for (Message shape(f.text()); shape.next(&g);) {
      if (g.number == 1) port->dims.push_back(read_size(g.text()));
    }
  }
}

Port read_port(std::string_view bytes) {
  Port p;
  Field f, g;
  for (Message m(bytes); m.next(&f);) {
    if (f.number == 1) p.name = f.name();
    if (f.number != 2) continue;
    for (Message type(f.text()); type.next(&g);) {
      if (g.number == 1) read_tensor_type(g.text(), &p);  // sequences and maps keep dtype 0
    }
  }
  return p;
}

void read_into(std::string_view bytes, Graph* graph) {
  Field f;
  for (Message m(bytes); m.next(&f);) {
    switch (f.number) {
      case 1:
        graph->nodes.push_back(read_node(f.text()));
        break;
      case 5:
        graph->initializers.push_back(read_tensor(f.text()));
        break;
      case 11:
        graph->inputs.push_back(read_port(f.text()));
        break;
      case 12:
        graph->outputs.push_back(read_port(f.text()));
        break;
      default:
        break;
    }
  }
}

void read_opset(std::string_view bytes, int64_t* opset) {
  std::string domain;
  int64_t version = 0;
  Field f;
  for (Message m(bytes); m.next(&f);) {
    if (f.number == 1) domain = f.name();
    if (f.number == 2) version = f.integer();
  }
  if (domain.empty() || domain == "ai.onnx") *opset = version;
}

Function read_function(std::string_view bytes) {
  Function made;
  Field f;
  for (Message m(bytes); m.next(&f);) {
    switch (f.number) {
      case 1:
        made.name = f.name();
        break;
      case 4:
        made.inputs.push_back(f.name());
        break;
      case 5:
        made.outputs.push_back(f.name());
        break;
      case 7:
        made.nodes.push_back(read_node(f.text()));
        break;
      case 9:
        read_opset(f.text(), &made.opset);
        break;
      case 10:
        made.domain = f.name();
        break;
      case 11: {
        std::string name;
        Attribute a = read_attribute(f.text(), &name);
        made.defaults[name] = std::move(a);
        break;
      }
      default:
        break;
    }
  }
  return made;
}

}  // namespace

Graph read_graph(std::string_view bytes) {
  Graph graph;
  read_into(bytes, &graph);
  return graph;
}

Model read_model(std::string_view bytes) {
  Model model;
  Field f;
  for (Message m(bytes); m.next(&f);) {
    if (f.number == 7) read_into(f.text(), &model.graph);
    if (f.number == 8) read_opset(f.text(), &model.opset);
    if (f.number == 25) model.functions.push_back(read_function(f.text()));
  }
  if (model.graph.outputs.empty()) damaged("a graph with outputs, got none");
  return model;
}

ir::DType dtype_of(int64_t onnx_dtype, const std::string& where) {
  using ir::DType;
  switch (onnx_dtype) {
    case 1:
      return DType::kF32;
    case 2:
      return DType::kU8;
    case 3:
      return DType::kI8;
    case 4:
      return DType::kU16;
    case 5:
      return DType::kI16;
    case 6:
      return DType::kI32;
    case 7:
      return DType::kI64;
    case 9:
      return DType::kBool;
    case 10:
      return DType::kF16;
    case 11:
      return DType::kF64;
    case 12:
      return DType::kU32;
    case 13:
      return DType::kU64;
    case 16:
      return DType::kBF16;
    default:
      break;
  }
  throw Error(RM_UNIMPLEMENTED,
              "[onnx] expected tensors of an element type that programs have, got ONNX type " +
                  std::to_string(onnx_dtype) + " at " + where + "; try float32 or int64",
              "RM341");
}

int64_t tensor_size(const Tensor& tensor) {
  auto size = static_cast<int64_t>(ir::size_bytes(dtype_of(tensor.dtype, "'" + tensor.name + "'")));
  for (int64_t d : tensor.dims) {
    if (d < 0 || __builtin_mul_overflow(size, d, &size) || size > (int64_t{1} << 46)) {
      damaged("a shape that memory can hold for '" + tensor.name + "', got another");
    }
  }
  return size;
}

std::string_view tensor_bytes(const Tensor& tensor, std::string* storage) {
  const ir::DType dtype = dtype_of(tensor.dtype, "'" + tensor.name + "'");
  const auto wanted = static_cast<size_t>(tensor_size(tensor));
  std::string_view bytes = tensor.raw;
  if (bytes.empty()) {
    const size_t item = ir::size_bytes(dtype);
    auto add = [&](const void* value) { storage->append(static_cast<const char*>(value), item); };
    for (double v : tensor.reals) {
      const auto narrow = static_cast<float>(v);
      if (dtype == ir::DType::kF32) add(&narrow);
      if (dtype == ir::DType::kF64) add(&v);
    }
    const bool takes_integers = dtype != ir::DType::kF32 && dtype != ir::DType::kF64;
    for (int64_t v : tensor.integers) {
      if (takes_integers) add(&v);  // little endian: the low bytes come first
    }
    bytes = *storage;
  }
  if (bytes.size() != wanted) {
    damaged(std::to_string(wanted) + " bytes of '" + tensor.name + "', got " +
            std::to_string(bytes.size()));
  }
  return bytes;
}

}  // namespace rm::onnx
