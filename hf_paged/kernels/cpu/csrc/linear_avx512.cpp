#include "vec_avx512.h"

#include "linear_epilogue.h"
#include "linear_kernels.h"

namespace hf_paged {

extern const LinearKernels linear_avx512 = avx512::linear_table(64);
extern const LinearEpilogue linear_epilogue_avx512 = avx512::linear_epilogue_table;

}  // namespace hf_paged
