// What Python calls. Every function takes one array of 64-bit integers: addresses, sizes, strides in elements, and fp64
// numbers by their bits; see native_backend.py, which packs them.
#include <cstring>

#include "attention.h"
#include "fused.h"
#include "repeat.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using namespace mainspring;

namespace {

double number(int64_t bits) {
    double value;
    std::memcpy(&value, &bits, 8);
    return value;
}

template <class T>
T* at(int64_t address) {
    return (T*)address;
}

}  // namespace

// Its declaration is decoder.h's: attention is compiled here, once.
void mainspring::attend_in_team(const AttentionCall& call, Team& team, int rank) {
    const auto with = [&](auto math, auto cache) {
        Attention<decltype(math), decltype(cache)> attention(call);
        attention.run(team, rank);
    };
#if MAINSPRING_BF16_ATTENTION
    if (call.query_dtype == Dtype::bf16 && call.cache_dtype == Dtype::bf16) return with(Bf16Math(), bf16());
    if (call.query_dtype == Dtype::bf16 && call.cache_dtype == Dtype::fp8) return with(Bf16Math(), fp8());
#endif
    with_cache_dtype(call.cache_dtype, [&](auto cache) { with(Fp32Math(), cache); });
}

// Likewise repeat.h's.
void mainspring::choose_in_team(const Choice& choice, int64_t* chosen, Team& team) {
    const Choosing each(choice, chosen);
    for (int64_t row = team.take(); row < choice.rows; row = team.take()) each(row);
}

// A plan, to be freed with mainspring_attention_forget.
EXPORT void* mainspring_attention_plan(const int64_t* a) {
    Spec spec;
    spec.q_heads = int(a[0]), spec.kv_heads = int(a[1]), spec.key_dim = int(a[2]), spec.value_dim = int(a[3]);
    spec.window = a[4], spec.scale = float(number(a[5])), spec.softcap = float(number(a[6]));
    spec.bias = at<const float>(a[14]), spec.bias_columns = a[15];  // outlives the plan
    return plan_attention(
               spec, int(a[7]), at<const int32_t>(a[8]), at<const int32_t>(a[9]), at<const int32_t>(a[10]),
               at<const int32_t>(a[11]), int(a[12]), int(a[13]), at<const int32_t>(a[16])
    ).release();
}

EXPORT void mainspring_attention_forget(void* plan) { delete (Plan*)plan; }

EXPORT void mainspring_attention(const int64_t* a) {
    AttentionCall call;
    call.plan = at<Plan>(a[0]);
    call.query = at<const char>(a[1]), call.query_row = a[2], call.query_head = a[3];
    call.query_dtype = Dtype(a[4]), call.cache_dtype = Dtype(a[5]);
    call.keys = {at<char>(a[6]), a[7], a[8], a[9]};
    call.values = {at<char>(a[10]), a[11], a[12], a[13]};
    call.sinks = at<const float>(a[14]);
    call.out = at<char>(a[15]), call.out_rows = a[16];
    attend(call, int(a[17]));
}

EXPORT void mainspring_rms_norm(const int64_t* a) {
    const RowView x = {at<void>(a[0]), a[1], a[2], a[3], a[4]};
    rms_norm(
        x, Dtype(a[5]), at<void>(a[6]), Dtype(a[7]), a[8], float(number(a[9])), float(number(a[10])), at<void>(a[11]),
        int(a[12])
    );
}

EXPORT void mainspring_add_rms_norm(const int64_t* a) {
    add_rms_norm(
        at<void>(a[0]), at<void>(a[1]), Dtype(a[2]), at<void>(a[3]), Dtype(a[4]), a[5], a[6], float(number(a[7])),
        float(number(a[8])), int(a[9])
    );
}

EXPORT void mainspring_act_and_mul(const int64_t* a) {
    act_and_mul(at<void>(a[0]), a[1], Dtype(a[2]), Activation(a[3]), a[4], a[5], at<void>(a[6]), int(a[7]));
}

EXPORT void mainspring_rotate_and_append(const int64_t* a) {
    TokensCall call;
    call.tokens = a[0], call.dtype = Dtype(a[1]);
    call.query = {at<void>(a[2]), a[3], a[4], a[5]};
    call.key = {at<void>(a[6]), a[7], a[8], a[9]};
    call.value = {at<void>(a[10]), a[11], a[12], a[13]};
    call.key_dim = a[14], call.value_dim = a[15];
    call.cos_sin = at<const float>(a[16]), call.cos_sin_stride = a[17], call.rotary_dim = a[18], call.interleaved = a[19];
    call.keys = {at<char>(a[20]), a[21], a[22], a[23]};
    call.values = {at<char>(a[24]), a[25], a[26], a[27]};
    call.cache_dtype = Dtype(a[28]);
    call.blocks = at<const int32_t>(a[29]), call.rows = at<const int32_t>(a[30]);
    rotate_and_append(call, int(a[31]));
}

EXPORT void mainspring_choose(const int64_t* a) { choose(*(const Choice*)a, at<int64_t>(a[25]), int(a[26])); }

EXPORT void mainspring_score(const int64_t* a) {
    score(at<void>(a[0]), Dtype(a[1]), a[2], a[3], a[4], at<const int64_t>(a[5]), at<const Scoring>(a[6]), int(a[7]));
}
