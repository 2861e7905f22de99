// Runs programs with AMX instructions on a processor without them: each raises SIGILL, and the handler carries it out.
//
// So the tests run the very machine code of the package, as the compiler made it, and not only its source. The
// instructions are VEX-coded (Intel SDM, volume 2, "AMX instruction set reference"):
//
//   C4 | R X B map | W vvvv L pp | opcode | mod reg rm | scale index base | displacement
//
//   pp opcode
//   -  49       ldtilecfg [mem]; tilerelease where mod = 3        F2 4B  tileloadd reg, [base + index]
//   F2 49       tilezero reg                                      F3 4B  tilestored [base + index], reg
//   F3 5C       tdpbf16ps reg, rm, vvvv
//
// Whatever else raises SIGILL gets the handler that was there before.
#define HF_PAGED_EMULATE_AMX
#include <signal.h>
#include <stdlib.h>
#include <ucontext.h>

#include "tiles.h"

using namespace hf_paged;

namespace {

struct sigaction earlier;

int64_t& register_of(ucontext_t& context, int number) {
  static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return (int64_t&)context.uc_mcontext.gregs[order[number]];
}

// An instruction's fields; `address` and `index` where it has a memory operand.
struct Instruction {
  int prefix, opcode, mod, reg, rm, vvvv, length;
  int64_t address, index;

  Instruction(const uint8_t* code, ucontext_t& context) : prefix(-1), address(0), index(0) {
    const bool vex = code[0] == 0xc4 && (code[1] & 0x1f) == 2 && (code[2] & 0x84) == 0;  // map 0F38, W = 0, L = 0
    if (!vex) return;
    const int x = ~code[1] >> 6 & 1, b = ~code[1] >> 5 & 1;
    prefix = code[2] & 3;  // 0: none, 1: 66, 2: F3, 3: F2
    vvvv = ~code[2] >> 3 & 15;
    opcode = code[3];
    mod = code[4] >> 6;
    reg = code[4] >> 3 & 7;
    rm = code[4] & 7;
    length = 5;
    if (mod == 3) return;
    int base = rm | b << 3;
    if (rm == 4) {
      const int sib = code[length++], number = (sib >> 3 & 7) | x << 3;
      base = (sib & 7) | b << 3;
      if (number != 4) index = register_of(context, number) << (sib >> 6);
    }
    if (mod == 0 && (base & 7) == 5) abort();  // no base register: no such operand is in the kernels
    address = register_of(context, base);
    if (mod == 1) address += (int8_t)code[length];
    if (mod == 2) {
      int32_t displacement;
      memcpy(&displacement, code + length, sizeof(displacement));
      address += displacement;
    }
    length += mod == 1 ? 1 : mod == 2 ? 4 : 0;
  }
};

// Takes the layout that the kernels use, and no other: eight whole tiles.
void load_configuration(const uint8_t* bytes) {
  bool expected = bytes[0] == 1 && bytes[1] == 0;
  for (int i = 2; i < 16; i++) expected = expected && bytes[i] == 0;
  for (int tile = 0; tile < 16; tile++) {
    uint16_t row_bytes;
    memcpy(&row_bytes, bytes + 16 + 2 * tile, sizeof(row_bytes));
    expected = expected && row_bytes == (tile < tiles::COUNT ? 64 : 0);
    expected = expected && bytes[48 + tile] == (tile < tiles::COUNT ? tiles::ROWS : 0);
  }
  if (expected) tiles::configure();
}

void move(const Instruction& i, bool to_memory) {
  for (int row = 0; row < tiles::ROWS; row++) {
    void* memory = (void*)(i.address + row * i.index);
    if (to_memory) memcpy(memory, tiles::state.tile[i.reg][row], 64);
    else if (tiles::state.configured) memcpy(tiles::state.tile[i.reg][row], memory, 64);
  }
}

void clear(int tile) {
  if (tiles::state.configured) memset(tiles::state.tile[tile], 0, tiles::BYTES);
}

void multiply(const Instruction& i) {
  if (i.reg == i.rm || i.reg == i.vvvv || i.rm == i.vvvv) abort();
  auto* tile = tiles::state.tile;
  _mm_setcsr(tiles::NEAREST_WITHOUT_DENORMALS);  // the interrupted program's settings come back with its registers
  tiles::multiply_add((float(*)[16])tile[i.reg], (const uint16_t(*)[tiles::K])tile[i.rm],
                      (const uint16_t(*)[16][2])tile[i.vvvv]);
}

bool carry_out(const Instruction& i) {
  enum { none = 0, f3 = 2, f2 = 3 };
  if (i.opcode == 0x49 && i.prefix == none && i.mod != 3) load_configuration((const uint8_t*)i.address);
  else if (i.opcode == 0x49 && i.prefix == none) tiles::release();
  else if (i.opcode == 0x49 && i.prefix == f2) clear(i.reg);
  else if (i.opcode == 0x4b && (i.prefix == f2 || i.prefix == f3)) move(i, i.prefix == f3);
  else if (i.opcode == 0x5c && i.prefix == f3) multiply(i);
  else return false;
  return true;
}

void handle(int, siginfo_t*, void* raw) {
  ucontext_t& context = *(ucontext_t*)raw;
  const Instruction instruction((const uint8_t*)context.uc_mcontext.gregs[REG_RIP], context);
  if (instruction.prefix >= 0 && carry_out(instruction)) context.uc_mcontext.gregs[REG_RIP] += instruction.length;
  else sigaction(SIGILL, &earlier, nullptr);  // the instruction runs again
}

}  // namespace

extern "C" __attribute__((visibility("default"))) int start_trap() {
  tiles::release();  // the thread's tiles exist before the first signal
  struct sigaction action = {};
  action.sa_sigaction = handle;
  action.sa_flags = SA_SIGINFO;
  return sigaction(SIGILL, &action, &earlier);
}

extern "C" __attribute__((visibility("default"))) int end_trap() { return sigaction(SIGILL, &earlier, nullptr); }
