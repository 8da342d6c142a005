// Selection over the rows; pure function of the problem, the rows and the forced name.
#include "select/kernel_table.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <limits>

#include "base/error.hpp"

namespace rm::select {
namespace {

// Without information about a device: the host.
DLDevice device_of(const rm_device_info* info) {
  if (info == nullptr) return {kDLCPU, 0};
  return {static_cast<DLDeviceType>(info->dl_device_type), info->dl_device_id};
}

}  // namespace

DLDevice Row::place() const { return device_of(device); }

void KernelTable::add(std::string backend, const rm_kernel* kernel,
                      const rm_device_info* device) {
  const DLDevice here = this->device(), there = device_of(device);
  if (!rows_.empty() &&
      (here.device_type != there.device_type || here.device_id != there.device_id)) {
    throw_invalid("[select] expected rows of one device, got '" + backend + "' beside '" +
                  rows_.front()->backend + "'");
  }
  auto row = std::make_unique<Row>(Row{kernel, device, std::move(backend)});
  by_op_.emplace(std::string(kernel->op.data, kernel->op.size), row.get());
  rows_.push_back(std::move(row));
}

DLDevice KernelTable::device() const {
  return rows_.empty() ? device_of(nullptr) : rows_.front()->place();
}

std::vector<const Row*> KernelTable::candidates(std::string_view op) const {
  std::vector<const Row*> out;
  auto collect = [&](std::string_view key) {
    auto [first, last] = by_op_.equal_range(key);  // multimap keeps insertion order within a key
    for (; first != last; ++first) out.push_back(first->second);
  };
  collect(op);
  size_t dot = op.find('.');
  if (dot != std::string_view::npos) collect(std::string(op.substr(0, dot)) + ".*");
  return out;
}

int64_t KernelTable::property(std::string_view name) const {
  for (const auto& row : rows_) {
    if (row->device == nullptr) continue;
    const rm_options& all = row->device->properties;
    for (size_t i = 0; i < all.size; ++i) {
      const rm_option& o = all.data[i];
      if (std::string_view(o.key.data, o.key.size) != name) continue;
      int64_t value = 0;
      std::from_chars(o.value.data, o.value.data + o.value.size, value);
      return value;
    }
  }
  return 0;
}

bool KernelTable::has_rows(std::string_view op) const { return !candidates(op).empty(); }

Selection KernelTable::select(const Problem& problem, std::string_view forced,
                             const std::vector<Refusal>& refused) const {
  Selection best;
  double best_cost = std::numeric_limits<double>::infinity();
  std::string_view op(problem.c().op.data, problem.c().op.size);
  for (const Row* row : candidates(op)) {
    const rm_kernel* k = row->kernel;
    rm_str why{"", 0};
    std::string label = row->backend + "/" + std::string(row->name());
    const auto refusal = std::find_if(refused.begin(), refused.end(),
                                      [&](const Refusal& r) { return r.row == row; });
    if (refusal != refused.end()) {
      best.reasons.push_back(label + ": no, " + refusal->why);
      continue;
    }
    if (k->supports != nullptr && k->supports(&problem.c(), row->device, &why) == 0) {
      best.reasons.push_back(label + ": no, " + std::string(why.data, why.size));
      continue;
    }
    if (!forced.empty() && row->name() == forced) {
      best.row = row;
      best.reasons.push_back(label + ": forced");
      return best;
    }
    for (uint32_t config = 0; config < std::max<uint32_t>(1, k->num_configs); ++config) {
      double cost = k->cost_ns != nullptr ? k->cost_ns(&problem.c(), row->device, config)
                                          : std::numeric_limits<double>::max();
      if (std::isnan(cost)) cost = std::numeric_limits<double>::max();  // no estimate
      best.reasons.push_back(label + ": " + std::to_string(static_cast<int64_t>(
                                                std::min(cost, 9e18))) + " ns estimated");
      if (best.row == nullptr || cost < best_cost) {
        best.row = row;
        best.config = config;
        best_cost = cost;
      }
    }
  }
  if (best.row == nullptr) {
    std::string message = "[select] expected a kernel for " + problem.str() + ", got none";
    for (const auto& r : best.reasons) message += "; " + r;
    const bool faulty = std::any_of(refused.begin(), refused.end(),
                                    [](const Refusal& r) { return r.judged; });
    throw Error(RM_UNIMPLEMENTED, message, faulty ? "RM510" : "RM202");
  }
  return best;
}

std::string KernelTable::fingerprint() const {
  std::string out;
  for (const auto& row : rows_) {
    out += row->backend + "/" + std::string(row->name()) + "=" +
           std::string(row->kernel->digest.data, row->kernel->digest.size) + "\n";
  }
  return out;
}

}  // namespace rm::select
