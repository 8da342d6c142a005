// A real worker process: what it does right, and everything that can go wrong with one.
#include <dirent.h>
#include <doctest/doctest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>
#include <thread>

#include "start_worker.hpp"

using namespace rm;
using namespace rm::worker;
using namespace rm::test;

namespace {

size_t count_entries(const char* folder, const char* named = "") {
  size_t count = 0;
  DIR* open = opendir(folder);
  while (const dirent* entry = readdir(open)) {
    count += std::strstr(entry->d_name, named) != nullptr ? 1 : 0;
  }
  closedir(open);
  return count;
}

/// Lines of a file that have `text`.
size_t lines_of(const char* path, const char* text) {
  std::ifstream file(path);
  size_t count = 0;
  for (std::string line; std::getline(file, line);) count += line.find(text) != std::string::npos;
  return count;
}

/// Of this process's own memory, without what it maps of files.
long resident_kib() {
  std::ifstream file("/proc/self/status");
  for (std::string line; std::getline(file, line);) {
    if (line.starts_with("RssAnon:")) return std::strtol(line.c_str() + 8, nullptr, 10);
  }
  return 0;
}

bool exists(pid_t pid) { return kill(pid, 0) == 0; }

}  // namespace

TEST_CASE("a program runs on what its inputs hold") {
  const auto worker = start();
  CHECK(worker->ready().backend == "test");
  CHECK(worker->ready().pid == static_cast<uint64_t>(worker->pid()));
  const auto program = load(*worker, "copy");
  auto* in = reinterpret_cast<float*>(program->memory().data() + program->inputs()[0].offset);
  auto* out = reinterpret_cast<float*>(program->memory().data() + program->outputs()[0].offset);
  for (int round = 0; round < 1000; ++round) {
    for (int i = 0; i < 4; ++i) in[i] = static_cast<float>(round + i);
    program->execute({10, {}});
    for (int i = 0; i < 4; ++i) REQUIRE(out[i] == static_cast<float>(round + i));
  }
}

TEST_CASE("weights are seen by the compiler where they lie") {
  const auto worker = start();
  auto weights = std::make_shared<Weights>();
  weights->slots = {{"w", {kDLUInt, 8, 1}, {5}, 64, 5, ""}};
  weights->memory = SharedMemory(128);
  std::memcpy(weights->memory.data() + 64, "hello", 5);
  CHECK(worker->compile({0, "p:", {}, {}}, weights, {}, {60, {}}) == "p:hello");
}

TEST_CASE("progress is reported while a compilation runs, and it can be cancelled") {
  const auto worker = start();
  int reports = 0;
  worker->compile({0, "slow 0.1", {}, {}}, nullptr,
                  [&](double, const std::string& stage) { reports += stage == "waiting"; },
                  {60, {}});
  CHECK(reports > 3);
  const auto begin = Clock::now();
  struct Stop {};
  CHECK_THROWS_AS(worker->compile({0, "slow 60", {}, {}}, nullptr, {},
                                  {60,
                                   [&] {
                                     if (seconds_since(begin) > 0.2) throw Stop();
                                   }}),
                  Stop);
  CHECK(seconds_since(begin) < 10);  // not the minute it asked for
  CHECK(worker->alive());            // it listened
  CHECK(worker->compile({0, "again", {}, {}}, nullptr, {}, {60, {}}) == "again");
}

TEST_CASE("a compilation that does not listen is ended with its process") {
  const auto worker = start();
  const auto begin = Clock::now();
  const Error error = failure_of([&] {
    worker->compile({0, "deaf 60", {}, {}}, nullptr, {}, {0.2, {}});
  });
  CHECK(error.reason() == "RM302");
  CHECK(seconds_since(begin) < 10);  // not the minute it asked for
  CHECK_FALSE(worker->alive());
}

TEST_CASE("a crash is an error with the signal and the end of the log") {
  const auto worker = start();
  const auto program = load(*worker, "crash");
  const pid_t pid = worker->pid();
  const Error error = failure_of([&] { program->execute({10, {}}); });
  CHECK(error.reason() == "RM303");
  CHECK(std::string(error.what()).find("signal 11") != std::string::npos);
  CHECK(std::string(error.what()).find("last words") != std::string::npos);
  CHECK_FALSE(worker->alive());
  CHECK_FALSE(exists(pid));
  CHECK(failure_of([&] { program->execute({10, {}}); }).reason() == "RM303");
}

TEST_CASE("an exit, a hang and an error of the device have errors of their own") {
  CHECK(std::string(failure_of([] {
                      load(*start(), "exit")->execute({10, {}});
                    }).what())
            .find("exit status 3") != std::string::npos);
  const auto begin = Clock::now();
  CHECK(failure_of([] { load(*start(), "hang")->execute({0.3, {}}); }).reason() == "RM308");
  CHECK(seconds_since(begin) < 10);
  const auto worker = start();
  CHECK(failure_of([&] { load(*worker, "error")->execute({10, {}}); }).reason() == "RM301");
  CHECK(worker->alive());
  CHECK(failure_of([&] { load(*worker, "bad"); }).reason() == "RM602");
  CHECK(worker->alive());
  CHECK(failure_of([&] {
          worker->compile({0, "crash", {}, {}}, nullptr, {}, {10, {}});
        }).reason() == "RM303");
}

TEST_CASE("a stopped process is given up after the heartbeat's time") {
  Worker::Options quick = options();
  quick.heartbeat_timeout_s = 0.5;
  const auto worker = Worker::start(quick, {});
  const auto program = load(*worker, "copy");
  program->execute({10, {}});
  kill(worker->pid(), SIGSTOP);
  while (state_of(worker->pid()) != 'T') std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const Error error = failure_of([&] { program->execute({30, {}}); });
  CHECK(error.reason() == "RM303");
  CHECK_FALSE(worker->alive());
}

TEST_CASE("a worker that cannot be started says which interpreter was missing") {
  Worker::Options missing = options();
  missing.process.command = {"/nonexistent/python"};
  const Error error = failure_of([&] { Worker::start(missing, {}); });
  CHECK(std::string(error.what()).find("/nonexistent/python") != std::string::npos);
  missing.process.command = {"/bin/false"};
  CHECK(failure_of([&] { Worker::start(missing, {}); }).reason() == "RM303");
}

TEST_CASE("a worker ends when its parent is killed, whatever it runs") {
  bool runs = false;
  SUBCASE("nothing") {}
  SUBCASE("a program that does not return") { runs = true; }
  int pipe_ends[2];
  REQUIRE(pipe(pipe_ends) == 0);
  const pid_t middle = fork();
  if (middle == 0) {
    const auto worker = start();
    const pid_t pid = worker->pid();
    if (write(pipe_ends[1], &pid, sizeof pid) != sizeof pid) _exit(1);
    if (runs) {
      const WaitLimits until_killed{60, [&, begin = Clock::now()] {
        if (seconds_since(begin) > 0.3) kill(getpid(), SIGKILL);
      }};
      load(*worker, "hang")->execute(until_killed);
    }
    kill(getpid(), SIGKILL);
  }
  pid_t orphan = 0;
  REQUIRE(read(pipe_ends[0], &orphan, sizeof orphan) == sizeof orphan);
  waitpid(middle, nullptr, 0);
  const auto begin = Clock::now();
  // Nobody of ours reaps it: a zombie of another parent counts as ended.
  const auto running = [&] {
    const char state = state_of(orphan);
    return state != 0 && state != 'Z' && state != 'X';
  };
  while (running() && seconds_since(begin) < 5) {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
  }
  CHECK_FALSE(running());
  CHECK(seconds_since(begin) < 10);  // not the minute it asked for
}

TEST_CASE("a forked child neither uses nor ends its parent's worker") {
  auto worker = start();
  const auto program = load(*worker, "copy");
  const pid_t child = fork();
  if (child == 0) {
    bool refused = false;
    try {
      program->execute({1, {}});
    } catch (const Error&) {
      refused = true;
    }
    worker.reset();
    _exit(refused ? 0 : 1);
  }
  int status = 0;
  waitpid(child, &status, 0);
  CHECK(status == 0);
  CHECK(worker->alive());
  program->execute({10, {}});
}

TEST_CASE("several threads execute through one worker") {
  const auto worker = start();
  std::atomic<int> good{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, t] {
      const auto program = load(*worker, "copy");
      auto* in = reinterpret_cast<float*>(program->memory().data());
      auto* out = reinterpret_cast<float*>(program->memory().data() + program->outputs()[0].offset);
      for (int round = 0; round < 200; ++round) {
        in[0] = static_cast<float>(1000 * t + round);
        program->execute({10, {}});
        good += out[0] == in[0];
      }
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(good == 800);
}

TEST_CASE("crash after crash leaves no process, descriptor, mapping or memory behind") {
  const int rounds = std::getenv("RM_SOAK") != nullptr ? 1000 : 60;
  failure_of([] { load(*start(), "crash")->execute({10, {}}); });  // what is made once is made now
  const size_t files = count_entries("/proc/self/fd");
  // Other programs of the machine come and go there: only names of ours count.
  const size_t shared = count_entries("/dev/shm", "rm_abstract");
  const size_t maps = lines_of("/proc/self/maps", "memfd");
  const long memory = resident_kib();
  std::vector<pid_t> pids;
  for (int round = 0; round < rounds; ++round) {
    const auto worker = start();
    pids.push_back(worker->pid());
    const auto program = load(*worker, round % 2 == 0 ? "crash" : "exit");
    CHECK(failure_of([&] { program->execute({30, {}}); }).reason() == "RM303");
  }
  CHECK(count_entries("/proc/self/fd") == files);
  CHECK(count_entries("/dev/shm", "rm_abstract") == shared);
  CHECK(lines_of("/proc/self/maps", "memfd") == maps);
  const long grown = resident_kib() - memory;
  MESSAGE(rounds << " crashes, " << grown << " KiB more memory");
  CHECK(grown < 16384);  // the allocator keeps some
  CHECK(waitpid(-1, nullptr, WNOHANG) == -1);  // no child is left, not even a zombie
  for (const pid_t pid : pids) CHECK_FALSE(exists(pid));
}

TEST_CASE("states stay in the worker between runs, and are copied from, to and within it") {
  const auto worker = start();
  const WaitLimits limits{60, {}};
  const TensorSlot slot{"", {kDLFloat, 32, 1}, {2}, 0, 0, ""};
  TensorSlot named = slot;
  named.name = "kept";
  const auto program = worker->load({0, "sum", {}, {slot}, {slot}, {named}}, nullptr, limits);
  const auto states = worker->make_states(0, {named}, limits);
  auto* in = reinterpret_cast<float*>(program->memory().data() + program->inputs()[0].offset);
  auto* out = reinterpret_cast<float*>(program->memory().data() + program->outputs()[0].offset);
  in[0] = 1, in[1] = 2;
  for (int i = 0; i < 3; ++i) program->execute(limits, states.get());
  CHECK(out[0] == 3);
  CHECK(out[1] == 6);
  const auto other = worker->make_states(0, {named}, limits);
  other->copy_from(*states, {0, 0, 0, UINT64_MAX, {}}, limits);
  program->execute(limits, other.get());
  CHECK(out[1] == 8);

  Weights host;
  uint64_t bytes = 0;
  host.slots = {named};
  place_slots(host.slots, bytes);
  host.memory = SharedMemory(bytes);
  auto* values = reinterpret_cast<float*>(host.memory.data());
  states->read(host, {0, 0, 0, UINT64_MAX, {}}, limits);
  CHECK(values[1] == 6);  // the copy went its own way
  values[1] = 10;
  states->write(host, {0, 0, 0, UINT64_MAX, {}}, limits);
  program->execute(limits, states.get());
  CHECK(out[1] == 12);
}

TEST_CASE("states are freed with their object, and lost with their worker") {
  const auto worker = start();
  const WaitLimits limits{60, {}};
  const TensorSlot slot{"", {kDLFloat, 32, 1}, {2}, 0, 0, ""};
  const auto program = load(*worker, "copy");
  for (int i = 0; i < 50; ++i) worker->make_states(0, {slot}, limits);
  const auto states = worker->make_states(0, {slot}, limits);
  program->execute(limits, states.get());
  CHECK(states->alive());

  const auto successor = start();
  const auto elsewhere = successor->make_states(0, {slot}, limits);
  CHECK(failure_of([&] { program->execute(limits, elsewhere.get()); }).code() ==
        RM_FAILED_PRECONDITION);
  kill(worker->pid(), SIGKILL);
  CHECK(failure_of([&] { program->execute(limits, states.get()); }).reason() == "RM303");
  CHECK(!states->alive());
  CHECK(failure_of([&] {
          elsewhere->copy_from(*states, {0, 0, 0, 1, {}}, limits);
        }).code() == RM_FAILED_PRECONDITION);
}
