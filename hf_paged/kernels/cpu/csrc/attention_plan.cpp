// Cuts a call into pieces: by request and K/V head, by rows where a request has many, by keys where there would be too
// few pieces, and once for several requests where they share a prefix.
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <numeric>

#include "attention.h"

namespace hf_paged {
namespace {

// Numbers are fixed, not taken from the machine: a call is cut the same way for every number of threads.
constexpr int64_t WANTED_PIECES = 64;      // so that threads of any number end at about the same time
constexpr int64_t LEAST_KEYS = 256;        // a piece of fewer keys is not worth its merge
constexpr int64_t LEAST_SHARED_KEYS = 64;  // nor is a shorter prefix worth a piece of its own
constexpr int64_t KEY_UNIT = 64;           // pieces of a cut context end at multiples of this

struct Request {
  int64_t first_token, query_len, seq_len, own_keys;  // own_keys: first position that is not in a shared piece
  const int32_t* block_table;
};

// Tokens that one kernel call takes together, and the keys that they see, before these are cut.
struct Tile {
  int64_t request, first_token, num_tokens, first_key, end_key, splits;
  bool shared;
  int64_t cost(int64_t group) const { return (end_key - first_key) * (16 + num_tokens * group); }
};

int64_t group_of(const AttentionArgs& args) { return args.num_query_heads / args.num_kv_heads; }
int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

void check_blocks(const AttentionArgs& args, const Request& request, int64_t index) {
  const int64_t end = ceil_div(request.seq_len, args.block_size);
  STD_TORCH_CHECK(end <= args.max_blocks, "hf_paged::paged_attention: request ", index, " has ", request.seq_len,
                  " tokens, but its row of block_tables names only ", args.max_blocks, " blocks of ", args.block_size);
  const int64_t first_position = request.seq_len - request.query_len;
  const int64_t first = args.window > 0 ? std::max<int64_t>(0, first_position - args.window + 1) / args.block_size : 0;
  int32_t low = 0, high = 0;
  for (int64_t i = first; i < end; i++) {
    low = std::min(low, request.block_table[i]);
    high = std::max(high, request.block_table[i]);
  }
  STD_TORCH_CHECK(low >= 0 && high < args.num_blocks, "hf_paged::paged_attention: block_tables of request ", index,
                  " names block ", low < 0 ? low : high, ", but the cache has blocks 0 ... ", args.num_blocks - 1);
}

std::vector<Request> checked_requests(const AttentionArgs& args) {
  STD_TORCH_CHECK(args.cu_seqlens_q[0] == 0, "hf_paged::paged_attention: cu_seqlens_q begins with ",
                  args.cu_seqlens_q[0], ", not with 0");
  std::vector<Request> requests(args.num_requests);
  for (int64_t i = 0; i < args.num_requests; i++) {
    Request& request = requests[i];
    const int64_t first_token = args.cu_seqlens_q[i];
    const int64_t query_len = (int64_t)args.cu_seqlens_q[i + 1] - first_token;
    STD_TORCH_CHECK(query_len >= 0 && args.seq_lens[i] >= query_len,
                    "hf_paged::paged_attention: request ", i, " has ", query_len, " new tokens by cu_seqlens_q, and ",
                    args.seq_lens[i], " in all by seq_lens");
    request = {first_token, query_len, args.seq_lens[i], 0, args.block_tables + i * args.block_tables_stride};
    check_blocks(args, request, i);
  }
  return requests;
}

// Finds requests whose tables begin with the same blocks.
class SharedPrefixes {
 public:
  SharedPrefixes(const AttentionArgs& args, std::vector<Request>& requests, AttentionPlan& plan,
                 std::vector<Tile>& tiles)
      : args_(args), requests_(requests), plan_(plan), tiles_(tiles) {}

  // Adds tiles for the shared keys, and sets `own_keys` of the requests that share them.
  void find() {
    std::vector<int64_t> candidates;
    for (int64_t i = 0; i < (int64_t)requests_.size(); i++)
      if (may_share(requests_[i])) candidates.push_back(i);
    if (candidates.size() < 2) return;
    std::stable_sort(candidates.begin(), candidates.end(), [&](int64_t a, int64_t b) {
      return std::lexicographical_compare(table(a), table(a) + shareable_blocks(a), table(b),
                                          table(b) + shareable_blocks(b));
    });
    for (size_t first = 0; first < candidates.size();) first = take_group(candidates, first);
  }

 private:
  // Requests with many rows read their keys few times anyway; a window hides the prefix sooner or later.
  bool may_share(const Request& request) const {
    const bool few_rows = request.query_len > 0 && request.query_len * group_of(args_) <= MANY_ROWS / 2;
    const bool unlimited = args_.window <= 0 || args_.window >= request.seq_len;
    return few_rows && unlimited && request.seq_len - request.query_len >= LEAST_SHARED_KEYS;
  }
  const int32_t* table(int64_t i) const { return requests_[i].block_table; }
  // All query tokens of a request must see all of the shared keys.
  int64_t shareable_blocks(int64_t i) const {
    return (requests_[i].seq_len - requests_[i].query_len) / args_.block_size;
  }
  int64_t common_blocks(int64_t a, int64_t b, int64_t limit) const {
    const int64_t end = std::min({limit, shareable_blocks(a), shareable_blocks(b)});
    return std::mismatch(table(a), table(a) + end, table(b)).first - table(a);
  }

  // Grows a group from candidates[first] as long as more keys are saved than lost by its shorter common prefix.
  size_t take_group(const std::vector<int64_t>& candidates, size_t first) {
    int64_t common = shareable_blocks(candidates[first]);
    size_t end = first + 1;
    for (; end < candidates.size(); end++) {
      const int64_t shorter = common_blocks(candidates[first], candidates[end], common);
      const int64_t others = end - first;
      if (shorter * args_.block_size < LEAST_SHARED_KEYS || others * shorter < (others - 1) * common) break;
      common = shorter;
    }
    if (end - first >= 2) add_tiles(candidates, first, end, common * args_.block_size);
    return end;
  }

  void add_tiles(const std::vector<int64_t>& candidates, size_t first, size_t end, int64_t num_keys) {
    const int64_t first_token = plan_.tokens.size();
    for (size_t i = first; i < end; i++) {
      Request& request = requests_[candidates[i]];
      request.own_keys = num_keys;
      for (int64_t token = 0; token < request.query_len; token++)
        plan_.tokens.push_back((int32_t)(request.first_token + token));
    }
    const int64_t num_tokens = plan_.tokens.size() - first_token;
    const int64_t tokens_of_tile = std::max<int64_t>(1, MANY_ROWS / group_of(args_));
    for (int64_t token = 0; token < num_tokens; token += tokens_of_tile)
      tiles_.push_back({candidates[first], first_token + token, std::min(tokens_of_tile, num_tokens - token), 0,
                        num_keys, 1, true});
  }

  const AttentionArgs& args_;
  std::vector<Request>& requests_;
  AttentionPlan& plan_;
  std::vector<Tile>& tiles_;
};

void add_own_tiles(const AttentionArgs& args, const std::vector<Request>& requests, std::vector<Tile>& tiles) {
  const int64_t tokens_of_tile = std::max<int64_t>(1, MANY_ROWS / group_of(args));
  for (int64_t i = 0; i < (int64_t)requests.size(); i++) {
    const Request& request = requests[i];
    for (int64_t token = 0; token < request.query_len; token += tokens_of_tile) {
      const int64_t num_tokens = std::min(tokens_of_tile, request.query_len - token);
      const int64_t position = request.seq_len - request.query_len + token;
      const int64_t first_key = args.window > 0 ? std::max<int64_t>(0, position - args.window + 1) : 0;
      tiles.push_back({i, request.first_token + token, num_tokens, std::max(first_key, request.own_keys),
                       position + num_tokens, 1, false});
    }
  }
}

// Keys of each piece of a tile but the last.
int64_t keys_of_piece(int64_t keys, int64_t splits) {
  return ceil_div(ceil_div(keys, splits), KEY_UNIT) * KEY_UNIT;
}

// Cuts long ranges of keys, so that there are about WANTED_PIECES pieces of equal cost, none of them empty.
void choose_splits(const AttentionArgs& args, std::vector<Tile>& tiles) {
  const int64_t group = group_of(args);
  int64_t total = 0;
  for (const Tile& tile : tiles) total += tile.cost(group) * args.num_kv_heads;
  for (Tile& tile : tiles) {
    const int64_t keys = tile.end_key - tile.first_key, rows = 16 + tile.num_tokens * group;
    const int64_t wanted = std::max(LEAST_KEYS, total / WANTED_PIECES / rows);
    tile.splits = ceil_div(keys, keys_of_piece(keys, std::max<int64_t>(1, (keys + wanted / 2) / wanted)));
  }
}

// Numbers the parts of each token: those of shared tiles come first.
std::vector<int32_t> number_parts(const std::vector<Tile>& tiles, AttentionPlan& plan) {
  plan.num_parts.assign(plan.positions.size(), 0);
  plan.first_parts.assign(plan.positions.size(), 0);
  std::vector<int32_t> first_part_of_tile;
  for (const Tile& tile : tiles) {
    first_part_of_tile.push_back(plan.num_parts[plan.tokens[tile.first_token]]);
    for (int64_t i = 0; i < tile.num_tokens; i++)
      plan.num_parts[plan.tokens[tile.first_token + i]] += (int32_t)tile.splits;
  }
  for (size_t token = 0; token < plan.num_parts.size(); token++) {
    if (plan.num_parts[token] < 2) continue;
    plan.first_parts[token] = (int32_t)plan.total_parts;
    plan.total_parts += plan.num_parts[token];
  }
  return first_part_of_tile;
}

void add_pieces(const AttentionArgs& args, const Tile& tile, int64_t first_part, AttentionPlan& plan) {
  const int64_t group = group_of(args), keys = tile.end_key - tile.first_key;
  const int64_t step = keys_of_piece(keys, tile.splits);
  for (int64_t split = 0; split < tile.splits; split++) {
    const int64_t first_key = tile.first_key + split * step, end_key = std::min(first_key + step, tile.end_key);
    for (int64_t kv_head = 0; kv_head < args.num_kv_heads; kv_head++)
      for (int64_t head = 0; head < group; head += MANY_ROWS)
        plan.pieces.push_back({tile.first_token, (int32_t)tile.request, (int32_t)tile.num_tokens,
                               (int32_t)(kv_head * group + head), (int32_t)std::min<int64_t>(MANY_ROWS, group - head),
                               (int32_t)kv_head, (int32_t)first_key, (int32_t)end_key, (int32_t)(first_part + split)});
  }
}

}  // namespace

AttentionPlan plan_attention(const AttentionArgs& args) {
  AttentionPlan plan;
  std::vector<Request> requests = checked_requests(args);
  const int64_t num_tokens = args.cu_seqlens_q[args.num_requests];
  plan.tokens.resize(num_tokens);
  std::iota(plan.tokens.begin(), plan.tokens.end(), 0);
  plan.positions.resize(num_tokens);
  for (const Request& request : requests)
    for (int64_t i = 0; i < request.query_len; i++)
      plan.positions[request.first_token + i] = (int32_t)(request.seq_len - request.query_len + i);
  std::vector<Tile> tiles;
  SharedPrefixes(args, requests, plan, tiles).find();
  add_own_tiles(args, requests, tiles);
  choose_splits(args, tiles);
  const std::vector<int32_t> first_parts = number_parts(tiles, plan);
  std::vector<int64_t> order(tiles.size());
  std::iota(order.begin(), order.end(), 0);
  const int64_t group = group_of(args);  // the most expensive first: the last to end should be a short one
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) {
    return tiles[a].cost(group) / tiles[a].splits > tiles[b].cost(group) / tiles[b].splits;
  });
  for (const int64_t i : order) add_pieces(args, tiles[i], first_parts[i], plan);
  plan.pieces_per_part = ceil_div(group, MANY_ROWS);
  return plan;
}

}  // namespace hf_paged
