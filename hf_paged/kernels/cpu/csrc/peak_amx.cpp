// Peak of the matrix unit: products of tiles into four sums, none of which waits for another.
#include "peak.h"
#include "tiles.h"

namespace hf_paged {
namespace {

constexpr int PEAK_TILE_ROUNDS = 128;  // x 4 products of 16 cycles: some 4 microseconds

void products() {
  alignas(64) uint16_t ones[tiles::ROWS * tiles::K];
  for (uint16_t& one : ones) one = 0x3f80;
  const tiles::Configured configured;
  tiles::each<4>([](auto i) { tiles::zero<decltype(i)::value>(); });
  tiles::each<4>([&](auto i) { tiles::load<4 + decltype(i)::value>(ones, 64); });
  for (int round = 0; round < PEAK_TILE_ROUNDS; round++) {
    tiles::multiply<0, 4, 6>();
    tiles::multiply<1, 4, 7>();
    tiles::multiply<2, 5, 6>();
    tiles::multiply<3, 5, 7>();
  }
}

}  // namespace

const PeakBurst peak_amx = {2 * 16 * 16 * 32 * 4 * PEAK_TILE_ROUNDS, products};

}  // namespace hf_paged
