// Fuzzes the .rmc reader: mutated files must never crash it and never be accepted unless they are
// what a writer wrote. Half of the mutants get sound digests again, so that the parser behind the
// digests is reached: there, acceptance is allowed and only memory safety is asked for.
//
//   cache_fuzz [--seconds N] [--seed N]
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cache/format.hpp"

namespace {

using rm::cache::DecodeStatus;
using Random = std::mt19937_64;

std::string encode(const rm::cache::Key& key, rm::cache::Artefact artefact,
                   const std::optional<rm::Digest>& secret) {
  const auto entry = rm::cache::make_entry(key, std::move(artefact), 1);
  std::string out;
  for (rm::ByteSpan piece : rm::cache::encode_entry(*entry, secret).pieces) {
    out.append(reinterpret_cast<const char*>(piece.data()), piece.size());
  }
  return out;
}

std::vector<std::string> seeds(const std::optional<rm::Digest>& secret) {
  const auto key = rm::cache::KeyBuilder(rm::cache::ArtefactKind::kProgram)
                       .set(rm::cache::KeyField::kProgram, "program")
                       .finish();
  std::vector<std::string> out;
  out.push_back(encode(key, {}, {}));
  out.push_back(encode(key, {{{"program", "small"}, {"", ""}, {"log", "text"}}, "g", "p", "c"}, {}));
  out.push_back(encode(key, {{{"program", std::string(6000, 'p')}, {"x", "y"}}, {}, {}, {}}, secret));
  return out;
}

uint64_t interesting(Random& random) {
  constexpr uint64_t kValues[] = {0,
                                  1,
                                  63,
                                  64,
                                  159,
                                  160,
                                  4095,
                                  4096,
                                  UINT32_MAX,
                                  INT64_MAX,
                                  1u << 31,
                                  UINT64_MAX,
                                  UINT64_MAX - 4095};
  return random() % 3 == 0 ? random() : kValues[random() % std::size(kValues)];
}

void mutate(std::string& file, const std::vector<std::string>& corpus, Random& random) {
  const size_t at = file.empty() ? 0 : random() % file.size();
  switch (random() % 8) {
    case 0:
      if (!file.empty()) file[at] = static_cast<char>(file[at] ^ (1 << (random() % 8)));
      break;
    case 1:
      if (!file.empty()) file[at] = static_cast<char>(random());
      break;
    case 2:
      file.resize(at);
      break;
    case 3:
      file.insert(at, std::string(random() % 300, static_cast<char>(random())));
      break;
    case 4:
      file.erase(at, random() % 200);
      break;
    case 5: {  // a length field of the header, or any eight bytes
      const uint64_t value = interesting(random);
      const size_t place = random() % 2 ? 80 + 8 * (random() % 2) : at;
      if (file.size() >= place + 8) std::memcpy(file.data() + place, &value, sizeof(value));
      break;
    }
    case 6: {  // a number in the metadata
      const size_t digit = file.find_first_of("0123456789", at);
      if (digit != std::string::npos) file.replace(digit, 1, std::to_string(interesting(random)));
      break;
    }
    default: {  // the front of one file and the back of another
      const std::string& other = corpus[random() % corpus.size()];
      file = file.substr(0, at) + other.substr(std::min(at, other.size()));
    }
  }
}

/// Makes both digests hold again and, mostly, the lengths fit: what is left to object to is inside.
void repair(std::string& file, Random& random) {
  if (file.size() < rm::cache::kHeaderBytes) return;
  if (random() % 4 != 0) {
    const uint64_t payload = file.size() - rm::cache::kHeaderBytes;
    std::memcpy(file.data() + 88, &payload, sizeof(payload));
    const uint32_t no_flags = 0;
    std::memcpy(file.data() + 8, &no_flags, sizeof(no_flags));
  }
  if (random() % 2 != 0) {  // the metadata ends where its JSON does
    const size_t end = file.find("}", rm::cache::kHeaderBytes);
    const uint64_t size = end == std::string::npos ? 0 : end + 1 - rm::cache::kHeaderBytes;
    std::memcpy(file.data() + 80, &size, sizeof(size));
  }
  const std::string_view view(file);
  const rm::Digest payload = rm::hash_bytes(view.substr(rm::cache::kHeaderBytes));
  std::memcpy(file.data() + 96, payload.bytes.data(), 32);
  const rm::Digest header = rm::hash_bytes(view.substr(0, 128));
  std::memcpy(file.data() + 128, header.bytes.data(), 32);
}

/// Reads every byte that the entry claims to have, so that a sanitizer sees a wrong claim.
unsigned touch(const rm::cache::Entry& entry) {
  unsigned sum = 0;
  for (const auto& section : entry.sections) {
    for (std::byte byte : section.bytes) sum += static_cast<unsigned>(byte);
  }
  return sum;
}

}  // namespace

int main(int argc, char** argv) {
  double seconds = 2;
  uint64_t seed = std::random_device()();
  for (int i = 1; i + 1 < argc; i += 2) {
    if (std::strcmp(argv[i], "--seconds") == 0) seconds = std::atof(argv[i + 1]);
    if (std::strcmp(argv[i], "--seed") == 0) seed = std::strtoull(argv[i + 1], nullptr, 10);
  }
  std::printf("seed %llu\n", static_cast<unsigned long long>(seed));
  Random random(seed);
  const std::optional<rm::Digest> secret = rm::hash_bytes("secret");
  const auto corpus = seeds(secret);
  uint64_t rounds = 0, repaired_accepted = 0;
  unsigned sum = 0;
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  while (std::chrono::steady_clock::now() < end) {
    for (int i = 0; i < 500; ++i, ++rounds) {
      std::string file = corpus[random() % corpus.size()];
      for (uint64_t n = 1 + random() % 4; n > 0; --n) mutate(file, corpus, random);
      const bool repaired = random() % 2 == 0;
      if (repaired) repair(file, random);
      // Exactly sized heap memory: one byte too far is an error for AddressSanitizer.
      const auto exact = std::make_unique<char[]>(file.size());
      std::memcpy(exact.get(), file.data(), file.size());
      rm::cache::DecodeRules rules;
      rules.secret = &secret;
      const auto decoded =
          rm::cache::decode_entry(rm::as_byte_span({exact.get(), file.size()}), nullptr, rules);
      (void)rm::cache::decode_header(rm::as_byte_span({exact.get(), file.size()}));
      if (decoded.status != DecodeStatus::kOk) continue;
      sum += touch(*decoded.entry);
      if (repaired) {
        ++repaired_accepted;
      } else if (std::find(corpus.begin(), corpus.end(), file) == corpus.end()) {
        std::fprintf(stderr, "a modified file was accepted (seed %llu, round %llu)\n",
                     static_cast<unsigned long long>(seed),
                     static_cast<unsigned long long>(rounds));
        return 1;
      }
    }
  }
  std::printf("%llu files, none accepted that was modified; %llu with repaired digests read (%u)\n",
              static_cast<unsigned long long>(rounds),
              static_cast<unsigned long long>(repaired_accepted), sum);
  return 0;
}
