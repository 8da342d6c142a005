// Device strings, the fallback policy, the table of reasons.
#include <doctest/doctest.h>

#include <set>
#include <string>

#include "base/error.hpp"
#include "control/device.hpp"
#include "control/fallback.hpp"
#include "control/reasons.hpp"

using namespace rm::control;
using Action = FallbackPolicy::Action;

TEST_CASE("every documented device string parses") {
  CHECK(parse_device("auto").kind == DeviceKind::kAuto);
  CHECK(parse_device("cpu").kind == DeviceKind::kCpu);
  for (const std::string name : {"gpu", "cuda", "npu", "rbln", "furiosa", "sim"}) {
    const DeviceRequest plain = parse_device(name), indexed = parse_device(name + ":12");
    CHECK(plain.kind == indexed.kind);
    CHECK_FALSE(plain.explicit_index);
    CHECK(indexed.index == 12);
    CHECK(indexed.explicit_index);
  }
  CHECK(kind_name(parse_device("gpu").kind) == "cuda");
  CHECK(parse_device("gpu:1").name() == "cuda");
}

TEST_CASE("any other name in lower case is that of a plugin") {
  for (const std::string name : {"mine", "tpu_2", "null"}) {
    const DeviceRequest request = parse_device(name + ":3");
    CHECK(request.kind == DeviceKind::kPlugin);
    CHECK(request.name() == name);
    CHECK(request.index == 3);
  }
}

TEST_CASE("anything else is an error that lists what is accepted") {
  for (const char* text : {"", "CPU", "2tpu", "t-pu", ":1", "mine:", "mine:x", "gpu:", "gpu:-1", "gpu:1x", "gpu: 1", "cpu:0",
                           "auto:1", "npu:99999999999999", "cuda:0:1", "gpu:+1"}) {
    try {
      parse_device(text);
      FAIL("accepted '", text, "'");
    } catch (const rm::Error& e) {
      CHECK(e.code() == RM_INVALID_ARGUMENT);
      CHECK(std::string(e.what()).find("furiosa[:N]") != std::string::npos);
    }
  }
}

TEST_CASE("the fallback policy decides by category") {
  CHECK(FallbackPolicy::parse("warn").action_for("RM402") == Action::kWarn);
  CHECK(FallbackPolicy::parse("allow").action_for("RM402") == Action::kAllow);
  CHECK(FallbackPolicy::parse("error").action_for("RM402") == Action::kError);
  const auto some = FallbackPolicy::parse("error:device,cache");
  CHECK(some.action_for("RM402") == Action::kError);
  CHECK(some.action_for("RM602") == Action::kError);
  CHECK(some.action_for("RM301") == Action::kWarn);
  for (const char* text :
       {"", "Error", "error:", "error:devices", "error:device,", "warn:device"}) {
    CHECK_THROWS_AS(FallbackPolicy::parse(text), rm::Error);
  }
}

TEST_CASE("every reason has a code of its category, a text and a remedy, and codes are unique") {
  std::set<std::string_view> codes;
  for (const Reason& reason : reasons()) {
    CHECK(codes.insert(reason.code).second);
    CHECK_FALSE(reason.text.empty());
    CHECK_FALSE(reason.remedy.empty());
    CHECK_FALSE(reason.category.empty());
    CHECK(find_reason(reason.code) == &reason);
    CHECK(reason.anchor.ends_with(reason.code));
  }
  CHECK(codes.size() >= 27);
  CHECK(find_reason("RM999") == nullptr);
  CHECK(category_of("RM501") == "correctness");
  CHECK(category_of("XX").empty());
}
