// Paged attention: how a call is cut into pieces of work and run. Free of torch.
//
//   call (AttentionArgs) --plan_attention--> pieces (AttentionItem) --one kernel each, any thread--> output
//
// A piece is some query tokens x the query heads of one K/V head against a range of one request's keys. Where the keys
// of a token are cut into several pieces (a long context and few requests, or a prefix that several requests share),
// each piece leaves a partial result, and whoever finishes a token's last piece merges them by their log-sum-exp, in
// the order of the keys: results depend on neither the number of threads nor their order.
#pragma once
#include <vector>

#include "attention_items.h"

namespace hf_paged {

// How a call is cut. Depends on lengths, block tables, head counts, block size and window only: the layers of a step
// that agree in these share one plan.
struct AttentionPlan {
  struct Piece {  // an item without its addresses
    int64_t first_token;  // in `tokens`
    int32_t request, num_tokens, first_head, num_heads, kv_head, first_key, end_key, part;
  };
  std::vector<Piece> pieces;
  std::vector<int32_t> tokens;       // the call's tokens in order, then those of each group that shares a prefix
  std::vector<int32_t> positions;    // by token
  std::vector<int32_t> first_parts;  // by token
  std::vector<int32_t> num_parts;    // by token; 1 where the only piece writes the output
  int64_t total_parts = 0;
  int64_t pieces_per_part = 1;       // head ranges that a K/V head's group is cut into
};

// Checks lengths and block ids (raises std::runtime_error by STD_TORCH_CHECK before anything is read) and cuts.
AttentionPlan plan_attention(const AttentionArgs& args);

// Runs a call on torch's threads. Call it from one thread, not from within a parallel region.
void attend(const AttentionArgs& args, const AttentionPlan& plan);
inline void attend(const AttentionArgs& args) { attend(args, plan_attention(args)); }

}  // namespace hf_paged
