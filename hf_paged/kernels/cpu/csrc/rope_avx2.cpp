#include "vec_avx2.h"

#include "rope_kernels.h"

const hf_paged::RopeKernels hf_paged::rope_avx2 = {hf_paged::avx2::rope_store};
