// Adds up the partial sums of all ducks; a source of its own because it is the one loop
// of the client that must be vectorised.
#include <algorithm>
#include <cstring>

#include "stream/client/client.h"

#if defined(__x86_64__) && defined(__GLIBC__)
#define DUCK_VECTORISED __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define DUCK_VECTORISED
#endif

namespace duck::stream {
namespace {

// The sums of a block stay in the L1 cache while all ducks are added.
constexpr size_t kBlock = 8192;

// Replies lie at any address.
template <class T>
T load(const uint8_t* from, size_t i) {
  T value;
  std::memcpy(&value, from + i * sizeof(T), sizeof(T));
  return value;
}

float widened(uint16_t bf16) {
  uint32_t bits = uint32_t(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

DUCK_VECTORISED void set_bf16(const uint8_t* from, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] = widened(load<uint16_t>(from, i));
}

DUCK_VECTORISED void add_bf16(const uint8_t* from, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] += widened(load<uint16_t>(from, i));
}

DUCK_VECTORISED void add_f32(const uint8_t* from, size_t count, float* out) {
  for (size_t i = 0; i < count; ++i) out[i] += load<float>(from, i);
}

}  // namespace

void sum_partials(const Ticket& ticket, float* out) {
  size_t count = size_t(ticket.num_rows) * ticket.hidden_size;
  bool is_bf16 = ticket.dtype == DType::kBf16;
  for (size_t begin = 0; begin < count; begin += kBlock, out += kBlock) {
    size_t size = std::min(kBlock, count - begin);
    bool is_first = true;
    for (const Slot& slot : ticket.slots) {
      const uint8_t* from =
          slot.reply.partial.data + begin * element_bytes(ticket.dtype);
      if (is_first && is_bf16)
        set_bf16(from, size, out);
      else if (is_first)
        std::memcpy(out, from, size * sizeof(float));
      else if (is_bf16)
        add_bf16(from, size, out);
      else
        add_f32(from, size, out);
      is_first = false;
    }
  }
}

}  // namespace duck::stream
