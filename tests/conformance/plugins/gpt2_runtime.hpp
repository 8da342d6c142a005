// What a vendor's library would be: GPT-2 in plain loops, from a folder transformers saved, with the
// keys and values of every row kept between tokens. For the made-up plugin of these tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

namespace gpt2 {

using Floats = std::vector<float>;

inline std::string bytes_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("expected the file " + path);
  return {std::istreambuf_iterator<char>(file), {}};
}

/// The number behind `"key": ` from `at` on.
inline double number(const std::string& json, const std::string& key, size_t at = 0) {
  const size_t found = json.find("\"" + key + "\"", at);
  if (found == std::string::npos) throw std::runtime_error("expected " + key + " in the model");
  return std::stod(json.substr(json.find_first_of("-0123456789", found + key.size() + 2)));
}

/// Tensors of f32 by name.
inline std::map<std::string, Floats> tensors_of(const std::string& path) {
  const std::string file = bytes_of(path);
  uint64_t size = 0;
  std::memcpy(&size, file.data(), sizeof size);
  const std::string header = file.substr(8, size);
  std::map<std::string, Floats> out;
  for (size_t at = header.find("\"transformer."); at != std::string::npos;
       at = header.find("\"transformer.", at + 1)) {
    const size_t end = header.find('"', at + 1), offsets = header.find("data_offsets", end);
    if (header.compare(header.find("dtype", end) + 8, 3, "F32") != 0) {
      throw std::runtime_error("expected weights in f32");
    }
    const auto from = static_cast<size_t>(number(header, "data_offsets", offsets - 1));
    const auto to = static_cast<size_t>(std::stod(header.substr(header.find(',', offsets) + 1)));
    Floats& values = out[header.substr(at + 13, end - at - 13)];
    values.resize((to - from) / sizeof(float));
    std::memcpy(values.data(), file.data() + 8 + size + from, to - from);
  }
  return out;
}

struct Model {
  explicit Model(const std::string& folder) : tensors(tensors_of(folder + "/model.safetensors")) {
    const std::string config = bytes_of(folder + "/config.json");
    layers = static_cast<size_t>(number(config, "n_layer"));
    width = static_cast<size_t>(number(config, "n_embd"));
    heads = static_cast<size_t>(number(config, "n_head"));
    longest = static_cast<size_t>(number(config, "n_positions"));
    words = static_cast<size_t>(number(config, "vocab_size"));
    epsilon = static_cast<float>(number(config, "layer_norm_epsilon"));
  }
  static bool is_one(const std::string& folder) {
    return bytes_of(folder + "/config.json").find("\"model_type\": \"gpt2\"") != std::string::npos;
  }
  const Floats& at(const std::string& name) const { return tensors.at(name); }

  std::map<std::string, Floats> tensors;
  size_t layers = 0, width = 0, heads = 0, longest = 0, words = 0;
  float epsilon = 0;
};

/// One row of a generation: what it has attended to so far.
class Row {
 public:
  explicit Row(const Model& model) : model_(model), keys_(model.layers), values_(model.layers) {}

  /// The logits after this token.
  Floats feed(int64_t token) {
    const size_t width = model_.width;
    Floats x(width);
    for (size_t i = 0; i < width; ++i) {
      x[i] = model_.at("wte.weight").at(static_cast<size_t>(token) * width + i) +
             model_.at("wpe.weight").at(fed_ * width + i);
    }
    ++fed_;
    for (size_t layer = 0; layer < model_.layers; ++layer) {
      const std::string name = "h." + std::to_string(layer) + ".";
      add(x, attention(normed(x, name + "ln_1"), name + "attn.", layer));
      Floats inner = linear(normed(x, name + "ln_2"), name + "mlp.c_fc");
      for (float& v : inner) {
        v = 0.5F * v * (1 + std::tanh(0.7978845608F * (v + 0.044715F * v * v * v)));
      }
      add(x, linear(inner, name + "mlp.c_proj"));
    }
    x = normed(x, "ln_f");
    Floats logits(model_.words);
    for (size_t word = 0; word < model_.words; ++word) {
      for (size_t i = 0; i < width; ++i) {
        logits[word] += x[i] * model_.at("wte.weight")[word * width + i];
      }
    }
    return logits;
  }

 private:
  static void add(Floats& x, const Floats& y) {
    for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
  }
  Floats normed(const Floats& x, const std::string& name) const {
    float mean = 0, square = 0;
    for (const float v : x) mean += v / static_cast<float>(x.size());
    for (const float v : x) square += (v - mean) * (v - mean) / static_cast<float>(x.size());
    Floats out(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      out[i] = (x[i] - mean) / std::sqrt(square + model_.epsilon) * model_.at(name + ".weight")[i] +
               model_.at(name + ".bias")[i];
    }
    return out;
  }
  Floats linear(const Floats& x, const std::string& name) const {
    Floats out = model_.at(name + ".bias");
    const Floats& weight = model_.at(name + ".weight");  // [in, out]
    for (size_t i = 0; i < x.size(); ++i) {
      for (size_t o = 0; o < out.size(); ++o) out[o] += x[i] * weight[i * out.size() + o];
    }
    return out;
  }
  Floats attention(const Floats& x, const std::string& name, size_t layer) {
    const size_t width = model_.width, size = width / model_.heads;
    const Floats all = linear(x, name + "c_attn");
    Floats &keys = keys_[layer], &values = values_[layer];
    keys.insert(keys.end(), all.begin() + static_cast<ptrdiff_t>(width),
                all.begin() + static_cast<ptrdiff_t>(2 * width));
    values.insert(values.end(), all.begin() + static_cast<ptrdiff_t>(2 * width), all.end());
    Floats out(width);
    for (size_t head = 0; head < model_.heads; ++head) {
      Floats weights(fed_);
      float most = -INFINITY, sum = 0;
      for (size_t t = 0; t < fed_; ++t) {
        for (size_t i = 0; i < size; ++i) {
          weights[t] += all[head * size + i] * keys[t * width + head * size + i];
        }
        weights[t] /= std::sqrt(static_cast<float>(size));
        most = std::max(most, weights[t]);
      }
      for (float& w : weights) sum += w = std::exp(w - most);
      for (size_t t = 0; t < fed_; ++t) {
        for (size_t i = 0; i < size; ++i) {
          out[head * size + i] += weights[t] / sum * values[t * width + head * size + i];
        }
      }
    }
    return linear(out, name + "c_proj");
  }

  const Model& model_;
  std::vector<Floats> keys_, values_;
  size_t fed_ = 0;
};

}  // namespace gpt2
