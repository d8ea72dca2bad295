// One token of the fp8 latent cache without its rope part, by the kernels' own headers:
// compiled once for each instruction set (-DSET_...).
#include <cstdint>
#include <cstring>

#if defined(SET_amx)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma")
#elif defined(SET_avx512)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma")
#elif defined(SET_avx2)
#pragma GCC target("avx2,fma")
#endif

#if defined(SET_amx) || defined(SET_avx512)
#include "host/kernels/decode_avx512.h"
using Decode = duck::host::Avx512Decode;
#else
#include "host/kernels/cache_rows.h"
using Decode = duck::host::PlainDecode;
#endif

extern "C" {

// x [size] -> row [size + size / 128 * 4]
void write_latent(int size, const float* x, uint8_t* row) {
  duck::host::LatentRow{size, 0, true}.write(x, nullptr, row);
}

// row -> out [size] bf16
void read_latent(int size, const uint8_t* row, uint16_t* out) {
  duck::host::LatentRow{size, 0, true}.read<Decode>(row, out);
}

}  // extern "C"
