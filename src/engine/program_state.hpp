// Internal to src/engine: what a program and its background jobs share.
#pragma once

#include <atomic>
#include <optional>
#include <set>

#include "engine/program.hpp"

namespace rm::engine {

struct Program::State {
  State(ir::Graph g, std::shared_ptr<const select::KernelTable> table, std::string forced,
        Packing p, runtime::DevicePtr where)
      : graph(std::move(g)),
        packing(p),
        device(std::move(where)),
        kernels(std::move(table), std::move(forced)) {}

  const ir::Graph graph;
  const Packing packing;
  const runtime::DevicePtr device;
  std::vector<ir::Ints> repeated;
  bool records = true;  // plans, where the device can
  // By stream: an arena may be taken again at once, behind the work that still uses it.
  std::shared_ptr<runtime::Arenas> arenas = std::make_shared<runtime::Arenas>();
  bool shares_arenas = false;
  select::PreparedCache kernels;

  mutable std::mutex mutex;  // guards what follows; never held while anything slow runs
  std::shared_ptr<runtime::ConstantStore> store =
      std::make_shared<runtime::ConstantStore>(nullptr, device);
  InstanceCache instances;
  std::atomic<bool> traced = false;  // `trace` has a value; read without the lock
  std::optional<StepTrace> trace;
  std::set<uint64_t> accepted_kernels;  // sets whose results were compared with the original's
  // Recordings there are; each has one reference more.
  const std::shared_ptr<char> recordings = std::make_shared<char>();
  bool packed_once = false;  // the packed weights exist: new shapes use them from the start
};

/// What one run has for itself.
struct Program::Run {
  std::shared_ptr<Instance> instance;
  std::unique_ptr<runtime::ExecutionContext> context;
  runtime::Arena arena;
  rm_stream* stream = nullptr;
};

}  // namespace rm::engine
