// The adapter over plugins of other versions and plugins that misbehave.
#include <doctest/doctest.h>

#include <cstring>
#include <stdexcept>

#include "backend/plugin_loader.hpp"
#include "backend/status.hpp"
#include "support.hpp"

using rm::backend::load_plugin;
using rm::backend::view;
using rm::test::failure_of;
using rm::test::odd_plugin;

TEST_CASE("a newer plugin's longer structs are read up to what this host knows") {
  const auto backend = load_plugin(odd_plugin(1));
  const rm_device_info& info = backend->get_device_info(0);
  CHECK(view(info.name) == "odd");
  CHECK(info.properties.size == 0);
  const auto rows = backend->kernels();
  REQUIRE(rows.size() == 2);
  CHECK(view(rows[0].name) == "copy_first");
  CHECK(view(rows[1].name) == "copy_second");
  size_t seen = 0;
  for (const rm_kernel& row : rows) seen += view(row.op) == "copy";
  CHECK(seen == 2);
}

TEST_CASE("an older plugin's unknown fields read as zero") {
  const auto backend = load_plugin(odd_plugin(2));
  const rm_device_info& info = backend->get_device_info(0);
  CHECK(info.memory_bytes == 1 << 20);
  CHECK(info.struct_size == offsetof(rm_device_info, alignment));
  CHECK(info.alignment == 0);
  CHECK(info.name.size == 0);
}

TEST_CASE("an exception out of a plugin's entry is an rm::Error that names plugin and entry") {
  for (const int kind : {4, 17}) {
    const auto backend = load_plugin(odd_plugin(kind));
    const auto failure = failure_of([&] { backend->device_count(); });
    CHECK(failure.code == RM_INTERNAL);
    CHECK(failure.says("backend odd: initialize"));
    std::string why;
    CHECK_FALSE(backend->is_available(&why));
    CHECK(why.find("exception across the C line") != std::string::npos);
  }
  CHECK(load_plugin(odd_plugin(5))->probe_score() == 0);
}

TEST_CASE("a plugin that writes past the struct it was given is caught") {
  const auto backend = load_plugin(odd_plugin(6));
  CHECK(failure_of([&] { backend->get_device_info(0); }).says("ignores struct_size"));
}

TEST_CASE("an entry that says OK and gives no handle is an error, not a NULL that is used") {
  const auto no_device = load_plugin(odd_plugin(18));
  const auto failure = failure_of([&] { no_device->get_device_info(0); });
  CHECK(failure.code == RM_INTERNAL);
  CHECK(failure.says("backend odd: device_open"));
  CHECK(failure.says("expected a handle"));

  const auto backend = load_plugin(odd_plugin(19));
  CHECK(backend->get_device_info(0).alignment == 64);
  const rm_program program{sizeof(rm_program), {}, {}};
  const auto says_which = [&](const char* entry, auto use) {
    const auto refused = failure_of(use);
    CHECK(refused.failed);
    CHECK(refused.code == RM_INTERNAL);
    CHECK_MESSAGE(refused.says(std::string("backend odd: ") + entry), refused.message);
  };
  says_which("compile", [&] { backend->prepare_model(0, program, {}); });
  says_which("deserialize", [&] { backend->deserialize(0, "artefact", {}); });
  says_which("buffer_alloc", [&] { backend->allocate(0, 0, 64, 64); });
  says_which("stream_create", [&] { backend->create_stream(0, 0); });
  says_which("stream_wrap", [&] { backend->wrap_stream(0, nullptr); });
  says_which("event_create", [&] { backend->create_event(0); });
}

TEST_CASE("counts nobody has are refused") {
  const auto backend = load_plugin(odd_plugin(11));
  CHECK(failure_of([&] { backend->device_count(); }).says("at most 4096"));
}

TEST_CASE("kernel rows that do not add up are refused before anybody reads them") {
  for (const int kind : {12, 13, 14}) {
    const auto backend = load_plugin(odd_plugin(kind));
    const auto failure = failure_of([&] { backend->kernels(); });
    CHECK_MESSAGE(failure.reason == "RM405", "kind ", kind);
  }
}

TEST_CASE("an unavailable backend says why") {
  std::string why;
  CHECK_FALSE(load_plugin(odd_plugin(15))->is_available(&why));
  CHECK(why.find("no device") != std::string::npos);
  CHECK_FALSE(load_plugin(odd_plugin(16))->is_available(&why));
  CHECK(why.find("no licence") != std::string::npos);
}

TEST_CASE("an entry the plugin does not have is RM_UNIMPLEMENTED") {
  const auto backend = load_plugin(odd_plugin(2));
  CHECK(failure_of([&] { backend->create_stream(0, 0); }).code == RM_UNIMPLEMENTED);
  CHECK(failure_of([&] { backend->fingerprint(0); }).code == RM_UNIMPLEMENTED);
}

TEST_CASE("a device index out of range is an error that gives the range") {
  const auto backend = load_plugin(RM_NULL_PLUGIN);
  const auto failure = failure_of([&] { backend->get_device_info(3); });
  CHECK(failure.code == RM_OUT_OF_RANGE);
  CHECK(failure.says("below 1"));
}

TEST_CASE("a program is compiled, serialised, reloaded and executed by the null plugin") {
  const auto backend = load_plugin(RM_NULL_PLUGIN);
  const std::string code = "any program";
  rm_program program{sizeof program, {"rm.ir/1", 7}, {code.data(), code.size()}};
  rm::backend::CompileOptions options;
  double last = 0;
  options.progress = [&](double fraction, std::string_view) { last = fraction; };
  const auto executable = backend->prepare_model(0, program, options);
  CHECK(last == 1.0);
  CHECK(executable->info().device_bytes == code.size());
  const std::string bytes = backend->serialize(*executable);
  CHECK(bytes == code);
  CHECK(backend->check_compat(0, bytes) == RM_COMPAT_OPTIMAL);
  const auto again = backend->deserialize(0, bytes, {});
  rm_execute_args args{};
  args.struct_size = sizeof args;
  backend->execute(*again, args);
  CHECK(backend->fingerprint(0) == "null/1");
  const auto support = backend->query_support(0, program, 3);
  CHECK(support[2].verdict == RM_NODE_NO);
  CHECK(support[2].reason == "this backend computes nothing");
}

TEST_CASE("cancelling ends a compilation, and a callback's own exception comes back as itself") {
  const auto backend = load_plugin(RM_NULL_PLUGIN);
  rm_program program{sizeof program, {"rm.ir/1", 7}, {"x", 1}};
  rm::backend::CompileOptions options;
  options.cancelled = [] { return true; };
  CHECK(failure_of([&] { backend->prepare_model(0, program, options); }).code == RM_CANCELLED);
  options.cancelled = []() -> bool { throw std::logic_error("from the caller"); };
  CHECK_THROWS_AS(backend->prepare_model(0, program, options), std::logic_error);
}

TEST_CASE("buffers belong to their owner and move") {
  const auto backend = load_plugin(RM_NULL_PLUGIN);
  rm::backend::Buffer buffer = backend->allocate(0, 0, 4096, 256);
  CHECK(reinterpret_cast<uintptr_t>(buffer.data()) % 256 == 0);
  std::memset(buffer.data(), 1, 4096);
  rm::backend::Buffer moved = std::move(buffer);
  CHECK_FALSE(static_cast<bool>(buffer));
  CHECK(moved.data() != nullptr);
  CHECK(failure_of([&] { backend->allocate(0, 0, 64, 3); }).code == RM_INVALID_ARGUMENT);
}

TEST_CASE("statuses carry code and message and cost nothing when there is none") {
  const rm_host_api* host = rm::backend::host_api();
  rm::backend::check(nullptr, "here");
  rm_status* status = host->status_create(RM_DATA_LOSS, {"lost", 4}, nullptr, 0);
  CHECK(host->status_code(status) == RM_DATA_LOSS);
  CHECK(view(host->status_message(status)) == "lost");
  const auto failure = failure_of([&] { rm::backend::check(status, "here"); });
  CHECK(failure.code == RM_DATA_LOSS);
  CHECK(failure.message == "[here] lost");
  CHECK(host->status_code(nullptr) == RM_OK);
  host->status_release(nullptr);
  CHECK(rm::backend::consume(host->status_create(RM_OK, {"x", 1}, nullptr, 0)) == RM_UNKNOWN);
}
