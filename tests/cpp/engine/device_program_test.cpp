// Programs on a device of their own: nothing runs before somebody waits, nothing on the host reads
// the device's memory, and memory is not used again before work that needs it is done.
#include <doctest/doctest.h>

#include <cstring>

#include "base/error.hpp"
#include "engine_support.hpp"
#include "recording_device.hpp"

using namespace rm;
using namespace rm::engine_test;
using engine::Program;
using ops::HostTensor;

namespace {

// Merged weights (a constant expression), a table of positions made on the host, temporaries.
const char* kModel =
    "rmir 1\nsym s0 [1,64]\ninput %0 \"x\" : f32[s0,32]\nweight %1 \"q\" : f32[32,32]\n"
    "weight %2 \"k\" : f32[32,32]\nweight %3 \"b\" : f32[64]\nweight %4 \"w\" : f32[16,64]\n"
    "%5 = concat(%1, %2) {axis=0} : f32[64,32]\n"
    "%6 = linear(%0, %5, %3) : f32[s0,64]\n"
    "%7 = iota() {start=<0>, step=1} : i64[s0]\n%8 = cast(%7) : f32[s0]\n"
    "%9 = reshape(%8) {shape=<s0,1>} : f32[s0,1]\n%10 = add(%6, %9) : f32[s0,64]\n"
    "%11 = tanh(%10) : f32[s0,64]\n%12 = linear(%11, %4) : f32[s0,16]\n"
    "%13 = softmax(%12) {axis=1, log=0} : f32[s0,16]\nreturn %13\n";

// A state that is updated in place.
const char* kState =
    "rmir 1\ninput %0 \"cache\" : f32[8,4] donated\ninput %1 \"at\" : i64[2]\n"
    "input %2 \"rows\" : f32[2,4]\n"
    "%3 = index_copy(%0, %1, %2) {axis=0} : f32[8,4]\n%4 = reduce(%3) {axes=[0], keepdim=0, "
    "kind=\"sum\"} : f32[4]\nreturn %3, %4\n";

struct Tensor {
  std::shared_ptr<void> memory;
  engine::TensorView view;
};

Tensor placed(RecordingDevice& device, const HostTensor& t) {
  Tensor out{device.allocate(t.bytes.size()), view(t)};
  device.upload(out.memory.get(), t.bytes.data(), t.bytes.size());
  out.view.data = out.memory.get();
  out.view.device = device.id();
  return out;
}

class DeviceOutputs final : public engine::OutputAllocator {
 public:
  explicit DeviceOutputs(RecordingDevice& device) : device_(device) {}
  void* allocate(size_t index, const ir::Layout& layout) override {
    layouts.resize(std::max(layouts.size(), index + 1));
    memory.resize(layouts.size());
    layouts[index] = layout;
    memory[index] = device_.allocate(static_cast<size_t>(layout.num_bytes()));
    return memory[index].get();
  }
  void reuse(size_t, size_t) override {}
  HostTensor read(size_t index) {
    ir::Dims dims(layouts[index].dims.begin(), layouts[index].dims.end());
    HostTensor out = ops::zeros({layouts[index].dtype, dims});
    const auto bytes = device_.bytes_of(memory[index].get(), out.bytes.size());
    std::memcpy(out.bytes.data(), bytes.data(), bytes.size());
    return out;
  }

  std::vector<ir::Layout> layouts;
  std::vector<std::shared_ptr<void>> memory;

 private:
  RecordingDevice& device_;
};

void* native(uintptr_t number) { return reinterpret_cast<void*>(number); }

HostTensor on_the_host(const Case& c, const HostTensor& x) {
  Program program(c.graph, cpu_kernels());
  program.set_weights(c.weight_tensors());
  HostOutputs outputs;
  program.run({view(x)}, outputs);
  return outputs.tensors[0];
}

}  // namespace

TEST_CASE("a run on a device only launches, and its results are the host's") {
  std::mt19937 rng(1);
  const Case c = load(kModel, rng);
  auto device = std::make_shared<RecordingDevice>();
  {
    Program program(c.graph, recorded_kernels(device), {}, engine::Packing::kFirst, device);
    program.set_weights(c.weight_tensors());
    for (int64_t rows : {3, 9, 3}) {
      HostTensor x = random_tensor(rng, ir::DType::kF32, {rows, 32});
      Tensor given = placed(*device, x);
      DeviceOutputs outputs(*device);
      program.run({given.view}, outputs, false, native(1));
      CHECK(device->waiting() > 0);
      device->drain();
      CHECK(max_difference(outputs.read(0), on_the_host(c, x)) < 1e-6);
    }
  }
  CHECK(device->errors.empty());
  CHECK(device->held_bytes == 0);
}

TEST_CASE("weights of the host are copied once, those of the device are used where they lie") {
  std::mt19937 rng(2);
  const Case c = load(kModel, rng);
  auto device = std::make_shared<RecordingDevice>();
  const HostTensor x = random_tensor(rng, ir::DType::kF32, {4, 32});
  {
    Program program(c.graph, recorded_kernels(device), {}, engine::Packing::kFirst, device);
    program.set_weights(c.weight_tensors());
    CHECK(device->uploads == 4);
    const Tensor given = placed(*device, x);
    for (int i = 0; i < 3; ++i) {
      DeviceOutputs outputs(*device);
      program.run({given.view}, outputs, false, native(1));
      device->drain();
    }
    CHECK(device->uploads == 6);  // the input's, and the positions of this shape
  }
  std::map<std::string, engine::OwnedTensor> there;
  std::vector<Tensor> kept;
  for (const auto& [name, t] : c.weights) {
    kept.push_back(placed(*device, t));
    there[name] = {kept.back().view, kept.back().memory};
  }
  const size_t before = device->held_bytes;
  Program program(c.graph, recorded_kernels(device), {}, engine::Packing::kFirst, device);
  program.set_weights(there);
  CHECK(device->held_bytes == before);
  CHECK(device->errors.empty());
}

TEST_CASE("runs on several streams at once do not share memory") {
  std::mt19937 rng(3);
  const Case c = load(kModel, rng);
  auto device = std::make_shared<RecordingDevice>();
  Program program(c.graph, recorded_kernels(device), {}, engine::Packing::kFirst, device);
  program.set_weights(c.weight_tensors());
  for (int round = 0; round < 20; ++round) {
    std::vector<HostTensor> inputs;
    std::vector<Tensor> given;
    std::vector<std::unique_ptr<DeviceOutputs>> outputs;
    for (uintptr_t run = 0; run < 6; ++run) {
      const auto rows = static_cast<int64_t>(2 + rng() % 5);
      inputs.push_back(random_tensor(rng, ir::DType::kF32, {rows, 32}));
      given.push_back(placed(*device, inputs.back()));
      outputs.push_back(std::make_unique<DeviceOutputs>(*device));
      program.run({given.back().view}, *outputs.back(), false, native(1 + run % 3));
    }
    device->drain();
    for (size_t run = 0; run < inputs.size(); ++run) {
      CHECK(max_difference(outputs[run]->read(0), on_the_host(c, inputs[run])) < 1e-6);
    }
  }
  CHECK(device->errors.empty());
}

TEST_CASE("a state of the device is updated in place, run after run") {
  std::mt19937 rng(4);
  const Case c = load(kState, rng);
  auto device = std::make_shared<RecordingDevice>();
  Program program(c.graph, recorded_kernels(device), {}, engine::Packing::kFirst, device);
  program.set_weights({});
  HostTensor expected = ops::zeros({ir::DType::kF32, {8, 4}});
  const Tensor cache = placed(*device, expected);
  std::vector<Tensor> kept;
  for (int64_t step = 0; step < 4; ++step) {
    const HostTensor at = ops::from_doubles({ir::DType::kI64, {2}},
                                            {static_cast<double>(step), static_cast<double>(step + 4)});
    const HostTensor rows = random_tensor(rng, ir::DType::kF32, {2, 4});
    std::memcpy(expected.bytes.data() + step * 16, rows.bytes.data(), 16);
    std::memcpy(expected.bytes.data() + (step + 4) * 16, rows.bytes.data() + 16, 16);
    kept.push_back(placed(*device, at));
    const engine::TensorView at_view = kept.back().view;
    kept.push_back(placed(*device, rows));
    DeviceOutputs outputs(*device);
    program.run({cache.view, at_view, kept.back().view}, outputs, false, native(1));
  }
  device->drain();
  const auto bytes = device->bytes_of(cache.memory.get(), expected.bytes.size());
  CHECK(std::memcmp(bytes.data(), expected.bytes.data(), bytes.size()) == 0);
  CHECK(device->errors.empty());
}

TEST_CASE("a plan is recorded after two runs and replayed with every call's own tensors") {
  std::mt19937 rng(6);
  const Case c = load(kModel, rng);
  auto device = std::make_shared<RecordingDevice>();
  device->records = true;
  {
    Program program(c.graph, recorded_kernels(device), {}, engine::Packing::kFirst, device);
    program.set_weights(c.weight_tensors());
    for (int round = 0; round < 6; ++round) {
      std::vector<HostTensor> inputs;
      std::vector<std::unique_ptr<DeviceOutputs>> outputs;
      for (uintptr_t run = 0; run < 4; ++run) {
        inputs.push_back(random_tensor(rng, ir::DType::kF32, {5, 32}));
        Tensor given = placed(*device, inputs.back());
        outputs.push_back(std::make_unique<DeviceOutputs>(*device));
        program.run({given.view}, *outputs.back(), false, native(1 + run % 2));
      }
      device->drain();
      for (size_t run = 0; run < inputs.size(); ++run) {
        CHECK(max_difference(outputs[run]->read(0), on_the_host(c, inputs[run])) < 1e-6);
      }
    }
    CHECK(device->recordings == 2);  // one a stream
    CHECK(device->replays == 22);
    CHECK(program.report().recordings == 2);
    HostTensor x = random_tensor(rng, ir::DType::kF32, {5, 32});
    auto changed = c.weights;
    changed.begin()->second = random_tensor(rng, ir::DType::kF32, {64});
    Case other{c.graph, changed};
    program.set_weights(other.weight_tensors());  // what was recorded had the old ones
    Tensor given = placed(*device, x);
    for (int i = 0; i < 4; ++i) {
      DeviceOutputs out(*device);
      program.run({given.view}, out, false, native(1));
      device->drain();
      CHECK(max_difference(out.read(0), on_the_host(other, x)) < 1e-6);
    }
  }
  CHECK(device->errors.empty());
  CHECK(device->held_bytes == 0);
}

TEST_CASE("programs that share arenas have one for all of them on a stream") {
  std::mt19937 rng(23);
  const Case c = load(kModel, rng);
  auto device = std::make_shared<RecordingDevice>();
  {
    auto arenas = std::make_shared<runtime::Arenas>();
    std::vector<std::unique_ptr<Program>> programs;
    for (int i = 0; i < 6; ++i) {
      programs.push_back(std::make_unique<Program>(c.graph, recorded_kernels(device), std::string(),
                                                   engine::Packing::kNever, device));
      programs.back()->share_arenas(arenas);
      programs.back()->set_weights(c.weight_tensors());
    }
    int64_t largest = 0;
    for (int round = 0; round < 3; ++round) {  // launched behind each other, and none waited for
      std::vector<HostTensor> inputs;
      std::vector<Tensor> given;
      std::vector<std::unique_ptr<DeviceOutputs>> outputs;
      for (auto& program : programs) {
        const auto rows = static_cast<int64_t>(2 + rng() % 60);
        inputs.push_back(random_tensor(rng, ir::DType::kF32, {rows, 32}));
        given.push_back(placed(*device, inputs.back()));
        outputs.push_back(std::make_unique<DeviceOutputs>(*device));
        program->run({given.back().view}, *outputs.back(), false, native(1));
        largest = std::max(largest, program->report().arena_bytes);
      }
      device->drain();
      for (size_t i = 0; i < programs.size(); ++i) {
        CHECK(max_difference(outputs[i]->read(0), on_the_host(c, inputs[i])) < 1e-6);
      }
    }
    CHECK(arenas->free_bytes() >= largest);
    CHECK(arenas->free_bytes() <= std::max<int64_t>(4096, largest * 5 / 4 + 1));
    CHECK(programs[0]->release_arenas() > 0);
    CHECK(arenas->free_bytes() == 0);
  }
  CHECK(device->errors.empty());
  CHECK(device->held_bytes == 0);
}

TEST_CASE("a plan is recorded in parts around a step that cannot be") {
  const char* kParts =
      "rmir 1\ninput %0 \"x\" : f32[6,32]\nweight %1 \"a\" : f32[32,32]\n"
      "weight %2 \"b\" : f32[32,32]\n%3 = linear(%0, %1) : f32[6,32]\n"
      "%4 = softmax(%3) {axis=1, log=0} : f32[6,32]\n%5 = linear(%4, %2) : f32[6,32]\n"
      "%6 = cumsum(%5) {axis=0} : f32[6,32]\n%7 = linear(%6, %1) : f32[6,32]\nreturn %7\n";
  std::mt19937 rng(19);
  const Case c = load(kParts, rng);
  auto device = std::make_shared<RecordingDevice>();
  device->records = true;
  {
    Program program(c.graph, recorded_kernels(device, "softmax"), {}, engine::Packing::kFirst, device);
    program.set_weights(c.weight_tensors());
    for (int run = 0; run < 5; ++run) {
      const HostTensor x = random_tensor(rng, ir::DType::kF32, {6, 32});
      const Tensor given = placed(*device, x);
      DeviceOutputs outputs(*device);
      program.run({given.view}, outputs, false, native(1));
      device->drain();
      CHECK(max_difference(outputs.read(0), on_the_host(c, x)) < 1e-6);
      CHECK(device->recordings == (run < 2 ? 0 : 2));
      CHECK(device->replays == (run < 2 ? 0 : 2 * (static_cast<size_t>(run) - 1)));
    }
    DeviceOutputs outputs(*device);
    const Tensor given = placed(*device, random_tensor(rng, ir::DType::kF32, {6, 32}));
    CHECK_THROWS_AS(program.launch_into({given.view}, outputs, native(1)), Error);  // needs the whole
  }
  CHECK(device->errors.empty());
  CHECK(device->held_bytes == 0);
}

TEST_CASE("a program that is never recorded has no memory but its arena") {
  std::mt19937 rng(17);
  const Case c = load(kModel, rng);
  auto device = std::make_shared<RecordingDevice>();
  device->records = true;
  Program program(c.graph, recorded_kernels(device), {}, engine::Packing::kFirst, device);
  program.never_record();
  program.set_weights(c.weight_tensors());
  const HostTensor x = random_tensor(rng, ir::DType::kF32, {4, 32});
  const Tensor given = placed(*device, x);
  size_t held = 0;
  for (int run = 0; run < 8; ++run) {
    DeviceOutputs outputs(*device);
    program.run({given.view}, outputs, false, native(1));
    device->drain();
    CHECK(max_difference(outputs.read(0), on_the_host(c, x)) < 1e-6);
    if (run == 0) held = device->held_bytes;
    CHECK(device->held_bytes == held);
  }
  CHECK(device->recordings == 0);
  CHECK(program.report().recordings == 0);
  CHECK(device->errors.empty());
}

TEST_CASE("a call whose tensors lie where they lay is recorded in place, others are copied") {
  // What an allocator that repeats itself does.
  class SameOutputs final : public engine::OutputAllocator {
   public:
    explicit SameOutputs(std::shared_ptr<void> memory) : memory_(std::move(memory)) {}
    void* allocate(size_t, const ir::Layout&) override { return memory_.get(); }
    void reuse(size_t, size_t) override {}

   private:
    std::shared_ptr<void> memory_;
  };
  std::mt19937 rng(8);
  const Case c = load(kModel, rng);
  auto device = std::make_shared<RecordingDevice>();
  device->records = true;
  {
    Program program(c.graph, recorded_kernels(device), {}, engine::Packing::kFirst, device);
    program.set_weights(c.weight_tensors());
    const HostTensor zeros = ops::zeros({ir::DType::kF32, {5, 32}});
    const Tensor places[] = {placed(*device, zeros), placed(*device, zeros), placed(*device, zeros),
                             placed(*device, zeros)};
    const std::shared_ptr<void> results[] = {device->allocate(5 * 16 * 4), device->allocate(5 * 16 * 4)};
    const auto run = [&](size_t input, size_t output) {
      const HostTensor x = random_tensor(rng, ir::DType::kF32, {5, 32});
      device->upload(places[input].memory.get(), x.bytes.data(), x.bytes.size());
      SameOutputs outputs(results[output]);
      program.run({places[input].view}, outputs, false, native(1));
      device->drain();
      const auto bytes = device->bytes_of(results[output].get(), 5 * 16 * 4);
      HostTensor got = ops::zeros({ir::DType::kF32, {5, 16}});
      std::memcpy(got.bytes.data(), bytes.data(), bytes.size());
      CHECK(max_difference(got, on_the_host(c, x)) < 1e-6);
    };
    for (int i = 0; i < 5; ++i) run(0, 0);
    CHECK(device->recordings == 1);  // the same places, but not often enough
    for (int i = 0; i < 4; ++i) run(0, 0);
    CHECK(device->recordings == 2);
    for (int i = 0; i < 8; ++i) run(i % 2, i / 2 % 2);  // some there, some by copies
    CHECK(device->recordings == 2);
    for (int i = 0; i < 8; ++i) run(1, 1);
    CHECK(device->recordings == 3);
    for (int i = 0; i < 8; ++i) run(2, 0);  // places that change again and again are copied
    for (int i = 0; i < 8; ++i) run(3, 0);
    for (int i = 0; i < 3; ++i) run(0, 0);
    CHECK(device->recordings == 3);
  }
  CHECK(device->errors.empty());
  CHECK(device->held_bytes == 0);
}

TEST_CASE("a recording that updates a state serves that state only") {
  std::mt19937 rng(7);
  const Case c = load(kState, rng);
  auto device = std::make_shared<RecordingDevice>();
  device->records = true;
  Program program(c.graph, recorded_kernels(device), {}, engine::Packing::kFirst, device);
  program.set_weights({});
  const HostTensor zeros = ops::zeros({ir::DType::kF32, {8, 4}});
  const Tensor caches[] = {placed(*device, zeros), placed(*device, zeros)};
  HostTensor expected[] = {zeros, zeros};
  for (int64_t step = 0; step < 24; ++step) {
    // In turn at first, where nothing is worth recording, then several steps of one.
    const auto which = static_cast<size_t>(step < 8 ? step % 2 : step / 4 % 2);
    const HostTensor at = ops::from_doubles({ir::DType::kI64, {2}},
                                            {static_cast<double>(step % 4), static_cast<double>(step % 4 + 4)});
    const HostTensor rows = random_tensor(rng, ir::DType::kF32, {2, 4});
    std::memcpy(expected[which].bytes.data() + step % 4 * 16, rows.bytes.data(), 16);
    std::memcpy(expected[which].bytes.data() + (step % 4 + 4) * 16, rows.bytes.data() + 16, 16);
    const Tensor given_at = placed(*device, at), given_rows = placed(*device, rows);
    DeviceOutputs outputs(*device);
    program.run({caches[which].view, given_at.view, given_rows.view}, outputs, false, native(1));
  }
  device->drain();
  for (size_t which = 0; which < 2; ++which) {
    const auto bytes = device->bytes_of(caches[which].memory.get(), zeros.bytes.size());
    CHECK(std::memcmp(bytes.data(), expected[which].bytes.data(), bytes.size()) == 0);
  }
  CHECK(device->recordings == 2);
  CHECK(device->replays == 14);
  CHECK(device->errors.empty());
}

TEST_CASE("steps launched into a caller's recording have memory of their own, kept by the caller") {
  std::mt19937 rng(8);
  const Case c = load(kModel, rng);
  auto device = std::make_shared<RecordingDevice>();
  device->records = true;
  {
    Program program(c.graph, recorded_kernels(device), {}, engine::Packing::kFirst, device);
    program.set_weights(c.weight_tensors());
    const HostTensor x = random_tensor(rng, ir::DType::kF32, {5, 32});
    Tensor given = placed(*device, x);
    for (int run = 0; run < 2; ++run) {
      DeviceOutputs early(*device), outputs(*device);
      CHECK_THROWS_AS(program.launch_into({given.view}, early, native(3)), Error);  // too early
      CHECK(device->waiting() == 0);
      program.run({given.view}, outputs, false, native(1));
      device->drain();
    }
    DeviceOutputs mine(*device);
    std::shared_ptr<void> kept = program.launch_into({given.view}, mine, native(3));
    // What others run meanwhile, with the same sizes, does not touch it; nor does another weight.
    std::vector<std::unique_ptr<DeviceOutputs>> theirs;
    const HostTensor y = random_tensor(rng, ir::DType::kF32, {5, 32});
    Tensor other = placed(*device, y);
    for (int run = 0; run < 4; ++run) {
      theirs.push_back(std::make_unique<DeviceOutputs>(*device));
      program.run({other.view}, *theirs.back(), false, native(1));
    }
    program.release_arenas();
    device->drain();
    CHECK(max_difference(mine.read(0), on_the_host(c, x)) < 1e-6);
    for (auto& outputs : theirs) CHECK(max_difference(outputs->read(0), on_the_host(c, y)) < 1e-6);
    program.start_trace();
    CHECK_THROWS_AS(program.launch_into({given.view}, mine, native(3)), Error);
  }
  CHECK(device->errors.empty());
  CHECK(device->held_bytes == 0);
}

TEST_CASE("a program is for one device") {
  std::mt19937 rng(5);
  const Case c = load(kModel, rng);
  auto device = std::make_shared<RecordingDevice>();
  CHECK_THROWS_WITH_AS(Program(c.graph, cpu_kernels(), {}, engine::Packing::kFirst, device),
                       doctest::Contains("another's"), Error);
  Program program(c.graph, cpu_kernels());
  auto weights = c.weight_tensors();
  weights.begin()->second.view.device = {kDLCUDA, 1};
  CHECK_THROWS_WITH_AS(program.set_weights(weights), doctest::Contains("another device"), Error);
}
