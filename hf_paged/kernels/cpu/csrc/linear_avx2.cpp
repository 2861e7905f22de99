#include "vec_avx2.h"

#include "linear_epilogue.h"
#include "linear_kernels.h"

namespace hf_paged {

extern const LinearKernels linear_avx2 = avx2::linear_table(16);
extern const LinearEpilogue linear_epilogue_avx2 = avx2::linear_epilogue_table;

}  // namespace hf_paged
