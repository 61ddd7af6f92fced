"""The installed flashinfer package has the signatures and the source properties that the backend relies on.

No GPU is needed, because the package imports without one and contains the sources of its kernels.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from flashinfer_double import Call, FlashInferDouble, tile_of
from mainspring.kernels.contract import AttentionSpec, PagedBatch
from mainspring.kernels.flashinfer import latents, prebuilt, shared_sums
from mainspring.kernels.flashinfer.partition import CUDA_CORE_GROUPS, LARGEST_TILE, QUERY_TILE
from test_flashinfer import AMPERE, BF16, FP8, HOPPER, PAGE, Layer, make, on_device, spec_of, staged

real = pytest.importorskip(
    "flashinfer", reason="FlashInfer is not installed: pip install 'mainspring[gpu]'", exc_type=ImportError
)

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
LATENTS = "BatchMLAPagedAttentionWrapper"
METHODS = [
    (wrapper, method)
    for wrapper in (DECODE, PREFILL, LATENTS)
    for method in ("__init__", "plan", "run", "reset_workspace_buffer")
    if (wrapper, method) != (LATENTS, "reset_workspace_buffer")
]
FUNCTIONS = (
    "append_paged_kv_cache append_paged_mla_kv_cache rmsnorm gemma_rmsnorm fused_add_rmsnorm gemma_fused_add_rmsnorm "
    "silu_and_mul gelu_and_mul gelu_tanh_and_mul apply_rope_with_cos_sin_cache_inplace top_k_mask_logits "
    "top_p_renorm_probs fast_decode_plan"
).split()
HEADERS = Path(real.__file__).parent / "data" / "include" / "flashinfer"
CSRC = Path(real.__file__).parent / "data" / "csrc"


@cache
def all_calls() -> list[Call]:
    """All calls of the backend to the package in a run that uses every feature."""
    calls: list[Call] = []
    for deterministic in (False, True):
        for gpu in (AMPERE, HOPPER):
            for spec, kv_dtype in (
                (spec_of(), BF16),
                (spec_of(2, 4, 128), BF16),
                (spec_of(1, 5, 96, window=20, softcap=3.0), FP8),
                (AttentionSpec(4, 1, 576, 512, 0.1, latent=True), BF16),
                (AttentionSpec(4, 1, 288, 256, 0.1, latent=True), FP8),
            ):
                backend, double = make(deterministic, gpu)
                if backend.refuses(spec, BF16, kv_dtype) is not None:
                    continue
                layer = Layer(backend, spec, (1100, 60, 50), BF16, kv_dtype)
                sinks = torch.zeros(spec.num_q_heads)
                for number, step in enumerate(
                    ([(0, 1090, 1), (1, 0, 20)], [(0, 1091, 1), (2, 7, 1)], [(1, 5, 1), (2, 0, 9)], [(1, 0, 9)])
                ):
                    batch, query = layer.step(step)
                    plan = backend.plan(spec, on_device(double, batch), torch.device("cpu"), number % 2)
                    backend.run(plan, query, layer.cache, sinks if number % 2 else None)
                memory = staged(double, 2, 16)
                for number in range(2):
                    batch, query = layer.step([(1, 20 + number, 1), (2, 30, 1)])
                    for target, source in zip(memory.device, batch[1:4], strict=True):
                        target[: len(source)] = source
                    batch = PagedBatch(*batch[:4], PAGE, 2, 0, memory.device)
                    backend.run(
                        backend.plan(spec, batch, torch.device("cpu"), number, graph=True), query[:2], layer.cache
                    )
                calls += double.calls
    backend, double = make()
    x, ones = torch.ones(4, 64, dtype=BF16), torch.ones(4)
    for offset in (0.0, 1.0):
        backend.rms_norm(x, x[0], 1e-6, offset)
        backend.add_rms_norm(x.clone(), x.clone(), x[0], 1e-6, offset)
    for activation in ("silu", "gelu", "gelu_tanh"):
        backend.act_and_mul(x, activation)
    backend.rotate(x[:, None].clone(), x[:, None].clone(), torch.ones(4, 64), True)
    backend.mask(x.float(), ones.long(), ones / 2, ones / 2)
    return calls + double.calls


def real_one(name: str) -> Callable[..., Any]:
    found = real
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def test_the_run_calls_everything_there_is() -> None:
    expected = {*FUNCTIONS} | {f"{wrapper}.{method}" for wrapper, method in METHODS}
    assert {call.name for call in all_calls()} == expected


def test_every_call_binds_to_the_real_signature() -> None:
    for call in all_calls():
        owner = () if call.wrapper is None else (call.wrapper,)
        inspect.signature(real_one(call.name)).bind(*owner, *call.args, **call.kwargs)
        if call.name == f"{DECODE}.plan":  # its own signature takes any keyword
            inspect.signature(real_one(f"{DECODE}._plan_impl")).bind(*owner, *call.args, **call.kwargs)


def parameters(function: Callable[..., Any]) -> list[tuple[str, Any, Any]]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_doubles_functions_have_the_real_signatures(name: str) -> None:
    assert parameters(getattr(FlashInferDouble(), name)) == parameters(real_one(name))


@pytest.mark.parametrize(("wrapper", "method"), METHODS)
def test_the_doubles_methods_have_the_real_signatures(wrapper: str, method: str) -> None:
    assert parameters(getattr(getattr(FlashInferDouble(), wrapper), method)) == parameters(
        real_one(f"{wrapper}.{method}")
    )


def test_the_doubles_decode_takes_the_same_options() -> None:
    double = getattr(FlashInferDouble(), DECODE)
    assert parameters(double._plan_impl) == parameters(real_one(f"{DECODE}._plan_impl"))


# No argument is dropped.


def test_nothing_is_given_to_a_backend_that_drops_it() -> None:
    shares = {"fixed_split_size", "disable_split_kv"}
    for call in all_calls():
        given = {name for name, value in call.kwargs.items() if value is not None}
        if call.name == f"{PREFILL}.plan" and call.wrapper._backend != "fa2":
            assert not given & shares
        if call.name == f"{DECODE}.plan":
            assert call.wrapper._backend == "fa2"
            assert call.wrapper.use_tensor_cores or not given & shares
        if call.name == "fast_decode_plan":
            assert call.args[0].use_tensor_cores or not given & shares
        if call.name.endswith(".run"):
            assert given <= {"out", "lse", "return_lse", "ckv_scale", "kpe_scale"}


@pytest.mark.parametrize("name", [f"{DECODE}._plan_impl", f"{PREFILL}.plan", "fast_decode_plan"])
def test_fa2_and_no_other_is_handed_how_to_share_keys_out(name: str) -> None:
    source = inspect.getsource(inspect.unwrap(real_one(name)))
    guarded = re.findall(r'if self\._backend == "fa2":\n((?:\s+args\.append\(.*\n)+)', source)
    assert len(guarded) == 1
    assert "fixed_split_size" in guarded[0]
    assert "disable_split_kv" in guarded[0]


def test_fa2_drops_sinks() -> None:
    source = inspect.getsource(inspect.unwrap(real.prefill.get_batch_prefill_module))
    fa2 = source[source.index("def paged_run") :].partition('elif backend == "fa2":')[2].partition("else:")[0]
    assert "paged_run_func(" in fa2
    assert "sinks" not in fa2


def test_auto_takes_fa3_for_what_the_planner_thinks_it_does() -> None:
    supported = real.utils.is_fa3_backend_supported
    assert supported(0, False, False, BF16, BF16)
    assert not supported(0, False, False, BF16, FP8)
    assert all(real.utils.is_fa3_prefill_head_dim_supported(dim, dim) for dim in prebuilt.HEAD_DIMS)


# Attributes that are not part of the public interface.


def attributes(function: Callable[..., Any], context: type) -> set[str]:
    """``self.…`` that a function reads (`ast.Load`) or sets (`ast.Store`)."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, context)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


def test_a_plan_is_made_in_the_page_locked_buffer_of_the_moment() -> None:
    for name in (f"{DECODE}._plan_impl", f"{PREFILL}.plan", "fast_decode_plan"):
        function = real_one(name)
        assert "_pin_memory_int_workspace_buffer" in attributes(function, ast.Load)
        assert "_pin_memory_int_workspace_buffer" not in attributes(function, ast.Store)
        source = inspect.getsource(inspect.unwrap(function))
        order = "self._float_workspace_buffer, self._int_workspace_buffer, self._pin_memory_int_workspace_buffer,"
        assert order in re.sub(r"\s+", " ", source)


def test_new_workspaces_are_what_plan_and_run_then_use() -> None:
    for wrapper in (DECODE, PREFILL):
        set_by_reset = attributes(real_one(f"{wrapper}.reset_workspace_buffer"), ast.Store)
        assert {"_float_workspace_buffer", "_int_workspace_buffer", "_pin_memory_int_workspace_buffer"} == set_by_reset
        assert {"_float_workspace_buffer", "_int_workspace_buffer"} <= attributes(real_one(f"{wrapper}.run"), ast.Load)


def test_a_latent_wrapper_has_no_reset_and_reads_its_workspaces_from_these_attributes() -> None:
    assert not hasattr(real_one(LATENTS), "reset_workspace_buffer")
    workspaces = {"_float_workspace_buffer", "_int_workspace_buffer"}
    assert workspaces | {"_pin_memory_int_workspace_buffer"} <= attributes(real_one(f"{LATENTS}.plan"), ast.Load)
    assert workspaces | {"_kv_indices_buf"} <= attributes(real_one(f"{LATENTS}.run"), ast.Load)
    assert not attributes(real_one(f"{LATENTS}.run"), ast.Load) & {
        "_qo_indptr_buf",
        "_kv_indptr_buf",
        "_kv_len_arr_buf",
    }
    source = inspect.getsource(inspect.unwrap(real_one(f"{LATENTS}.plan")))
    graph, _, eager = source.partition("if self._use_cuda_graph:")[2].partition("        else:\n")
    assert "self._kv_indices_buf[: len(kv_indices)].copy_(kv_indices, non_blocking=True)" in graph
    assert eager.count(".to(self.device, non_blocking=True)") == 4


def test_a_fast_plan_without_a_graph_takes_the_arrays_as_they_are_and_run_reads_them() -> None:
    arrays = {"_paged_kv_indptr_buf", "_paged_kv_indices_buf", "_paged_kv_last_page_len_buf"}
    assert arrays <= attributes(real_one("fast_decode_plan"), ast.Store)
    assert arrays <= attributes(real_one(f"{DECODE}.run"), ast.Load)
    source = inspect.getsource(inspect.unwrap(real_one("fast_decode_plan")))
    graph, _, eager = source.partition("if self.is_cuda_graph_enabled:")[2].partition("    else:\n")
    assert "copy_" not in graph
    assert eager.lstrip().startswith("self._paged_kv_indptr_buf = indptr\n")
    assert "global_override_indptr_cpu" in source
    # For tensor cores it reads last_page_len on the host: a tensor on the device would make it wait.
    assert "last_page_len_host = last_page_len.cpu()" in source


def test_what_a_fast_plan_leaves_out_the_full_plan_before_it_has_set() -> None:
    left_out = attributes(real_one(f"{DECODE}.run"), ast.Load) - attributes(real_one("fast_decode_plan"), ast.Store)
    from_elsewhere = attributes(real_one(f"{DECODE}._plan_impl"), ast.Store) | attributes(
        real_one(f"{DECODE}.__init__"), ast.Store
    )
    assert left_out - {"use_tensor_cores"} <= from_elsewhere


def test_max_sequence_kv_still_leaves_fa2_without_lengths() -> None:
    source = inspect.getsource(inspect.unwrap(real_one(f"{PREFILL}.plan")))
    without = source.partition("if max_sequence_kv is not None:")[2].partition("        else:\n")[0]
    assert "kv_lens_arr_host" not in without
    assert "seq_lens.cpu().flatten()" in source, "lengths on the host are taken as they are"


# Facts of the kernels.


def text(path: Path) -> str:
    return re.sub(r"\s+", " ", re.sub(r"//[^\n]*", "", path.read_text()))


def test_the_rule_for_tiles_of_queries() -> None:
    source = text(HEADERS / "utils.cuh")
    rule = source[source.index("FA2DetermineCtaTileQ") :].partition("inline int UpPowerOfTwo")[0]
    assert "if (avg_packed_qo_len > 64 && head_dim < 256) { return 128; }" in rule
    assert "if (avg_packed_qo_len > 16) { return 64; } else { return 16; }" in rule
    assert [tile_of(n, 128) for n in (1, 16, 17, 64, 65)] == [QUERY_TILE, 16, 64, 64, LARGEST_TILE]
    assert [tile_of(n, 256) for n in (16, 17, 65)] == [16, 64, 64]
    plan = text(HEADERS / "attention" / "scheduler.cuh")
    assert "avg_packed_qo_len = sum_packed_qo_len / batch_size" in plan
    assert "max_seq_len = total_num_rows - batch_size + 1" in plan


def test_the_rules_for_sharing_keys_out() -> None:
    plan = text(HEADERS / "attention" / "scheduler.cuh")
    assert "int num_blocks_per_sm = 2;" in plan
    assert "max_batch_size_if_split = max_grid_size / num_kv_heads" in plan
    assert "min_kv_chunk_size = std::max((128 / page_size), 1U)" in plan
    assert "kv_chunk_size = fixed_split_size;" in plan
    assert "enable_cuda_graph ? std::max(max_batch_size_if_split, total_num_tiles_q) : new_batch_size" in plan
    assert "num_qo_heads * padded_batch_size * cta_tile_q * head_dim_vo * sizeof(float)" in plan
    assert "new batch size should not exceed padded batch size" in plan


def test_keys_are_counted_from_the_first_or_from_where_the_first_rows_window_begins() -> None:
    kernel = text(HEADERS / "attention" / "prefill.cuh")
    kernel = kernel[kernel.index("void BatchPrefillWithPagedKVCacheDevice") :]
    assert "kv_len + (qo_tile_idx * CTA_TILE_Q) / group_size, qo_len + window_left)" in kernel
    assert "partition_kv ? min(kv_tile_idx * max_chunk_size + kv_start_idx, kv_len) : kv_start_idx" in kernel
    variant = text(HEADERS / "attention" / "variants.cuh")
    assert "window_left = (params.window_left >= 0) ? params.window_left : kv_len;" in variant
    assert "kv_idx + qo_len + window_left >= kv_len + qo_idx" in variant


def test_a_graph_without_shares_has_no_mask_of_valid_programs() -> None:
    """So surplus programs read the unused end of the page-locked buffer, which must be zeros."""
    run = text(CSRC / "batch_prefill.cu")
    run = run[run.index("void BatchPrefillWithPagedKVCacheRun") :]
    shares = run[run.index("if (plan_info.split_kv) {") :]
    assert "params.block_valid_mask" in shares.partition("params.padded_batch_size")[0]
    assert run.count("params.block_valid_mask = GetPtrFromBaseOffset") == 1


def test_attention_over_latents_takes_caches_and_queries_with_strides() -> None:
    for name in ("batch_mla_run.cu", "batch_mla_sm90_run.cu"):
        run = text(CSRC / name)
        for tensor, name in (("ckv_cache", "ckv"), ("kpe_cache", "kpe")):
            assert f"{name}_stride_page = {tensor}.stride(0)" in run
            assert f"{name}_stride_n = {tensor}.stride(1)" in run
        for tensor in ("q_nope", "q_pe"):
            assert f"{tensor}_stride_n = {tensor}.stride(0)" in run
            assert f"{tensor}_stride_h = {tensor}.stride(1)" in run
        assert "CONTIGUOUS" not in run
    append = text(CSRC / "page.cu")
    append = append[append.index("void append_paged_mla_kv_cache") :]
    assert "CHECK_LAST_DIM_CONTIGUOUS_INPUT(ckv_cache); CHECK_LAST_DIM_CONTIGUOUS_INPUT(kpe_cache);" in append
    assert "append_ckv_stride_n = append_ckv_strides[0]" in append


def test_latents_and_shared_dimensions_of_one_size() -> None:
    page = text(HEADERS / "page.cuh")
    assert f"HEAD_CKV_DIM = {latents.DIM};" in page
    assert f"HEAD_KPE_DIM = {latents.SHARED};" in page
    hopper = text(HEADERS / "attention" / "mla_hopper.cuh")
    assert f"static_assert(!USE_KV_REPACK || HEAD_DIM_CKV_ == {latents.DIM}," in hopper
    assert f"static_assert(!USE_KV_REPACK || HEAD_DIM_KPE_ == {latents.SHARED}," in hopper


def test_the_lists_of_a_plan_over_latents() -> None:
    plan = text(HEADERS / "attention" / "scheduler.cuh")
    plan = plan[plan.index("inline cudaError_t MLAPlan(") :]
    assert f"int max_total_num_works = {latents.MOST_WORKS};" in plan
    assert "total_num_works <=" not in plan, "it is checked now: LatentWrapper's caller need not count"
    assert plan.count("sizeof(IdType) * max_total_num_works") == 9
    assert plan.count("sizeof(IdType) * num_sm") == 5
    assert 4 * (9 * latents.MOST_WORKS + 5 * 1024) < latents.INT_WORKSPACE
    assert f"const int cta_tile_q = {latents.TILE};" in plan
    assert "if (avg_packed_qo_len > 64) { cluster_size = 2;" in plan
    assert "int kv_len_limit = f(std::max(ceil_div(total_kv_lens, num_clusters), 1L));" in plan, "by the batch"


def test_latents_behind_a_requests_last_are_read_as_zeros() -> None:
    """What lies in the cache there may be NaN, and is multiplied by 0."""
    for name, loads in (("mla.cuh", 4), ("mla_hopper.cuh", 2)):
        kernel = text(HEADERS / "attention" / name)
        kernel = kernel[kernel.index("void load_kv(") :].partition("compute_")[0]
        assert kernel.count("load_128b_async<SharedMemFillMode::kFillZero>") >= loads
    assert "constexpr float inf = 5e4;" in text(HEADERS / "math.cuh"), "a masked score is finite"


def test_sums_come_in_base_two() -> None:
    kernel = text(HEADERS / "attention" / "prefill.cuh")
    assert "math::ptx_log2(d[mma_q][j]) + float(m[mma_q][j])" in kernel
    hopper = text(HEADERS / "attention" / "hopper" / "attention_updater.cuh")
    assert "row_sum(mi) = row_max(mi) * sm_scale_log2 + math::ptx_log2(sum);" in hopper
    assert "math::ptx_log2(d[j]) + float(m[j])" in text(HEADERS / "attention" / "mla.cuh")
    assert "return m + math::ptx_log2(d)" in text(HEADERS / "attention" / "state.cuh")


def test_one_share_is_merged_without_rounding() -> None:
    """A row has the same bits as in a plan in which no request's keys are split."""
    merge = text(HEADERS / "attention" / "cascade.cuh")
    merge = merge[merge.index("void PersistentVariableLengthMergeStatesKernel") :]
    one = merge[merge.index("if (num_index_sets == 1) {") :].partition("continue;")[0]
    assert "v.cast_load(V + (indptr[pos] * num_heads + head_idx) * head_dim + tx * vec_size);" in one
    assert "DTypeO* tmp_v" in text(CSRC / "batch_prefill.cu"), "partial results have the output's dtype"


def test_the_groups_that_the_kernel_without_tensor_cores_knows() -> None:
    source = text(HEADERS / "utils.cuh")
    groups = source[source.index("define DISPATCH_GQA_GROUP_SIZE") :].partition("Unsupported group_size")[0]
    assert tuple(map(int, re.findall(r"group_size == (\d+)", groups))) == CUDA_CORE_GROUPS


def test_head_sizes_that_have_kernels() -> None:
    source = text(HEADERS / "utils.cuh")
    sizes = source[source.index("define DISPATCH_HEAD_DIM(") :].partition("Unsupported head_dim")[0]
    assert {*map(int, re.findall(r"case (\d+):", sizes))} >= {*prebuilt.HEAD_DIMS}


def test_the_plain_norm_reads_heads_that_lie_apart_and_gemmas_does_not() -> None:
    norm = text(CSRC / "norm.cu")
    plain, gemma = (norm[norm.index(f"void {name}(") :] for name in ("rmsnorm", "gemma_rmsnorm"))
    assert "else if (input_ndim == 3) {" in plain.partition("void rmsnorm_quant")[0]
    assert "CHECK_DIM(2, input);" in gemma.partition("void gemma_fused")[0]


def test_what_append_demands() -> None:
    append = text(CSRC / "page.cu")
    append = append[append.index("void append_paged_kv_cache") :].partition("void nvfp4")[0]
    assert "k/v strides must be identical" in append
    assert "static_cast<c_type*>(append_key.data_ptr())" in append, "keys are taken for the cache's dtype, unchecked"
    page = text(HEADERS / "page.cuh")
    assert "paged_kv.indptr[batch_indices[i]] * paged_kv.page_size + positions[i]" in page
    assert "constexpr uint32_t vec_size = std::max(16 / sizeof(DType), HEAD_DIM / 32);" in page


def test_gate_and_up_are_each_read_sixteen_bytes_at_a_time() -> None:
    kernel = text(HEADERS / "activation.cuh")
    assert "vec_size = 16 / sizeof(T)" in kernel
    assert "y_vec.cast_load(input + offset + d + idx * vec_size)" in kernel


def test_a_threads_angles_lie_in_one_half_of_the_table() -> None:
    rope = text(HEADERS / "pos_enc.cuh")
    assert "vec_idx = (tx * vec_size) % half_rotary_dim;" in rope
    assert "head_dim == 64 || head_dim == 128 || head_dim == 256 || head_dim == 512" in rope


def test_a_top_k_of_the_whole_vocabulary_changes_nothing_and_equals_stay() -> None:
    source = text(HEADERS / "topk.cuh")
    kernel = source[source.index("RadixTopKMaskLogitsKernel_MultiCTA") :]
    assert "if (k >= vocab_size) {" in kernel
    assert "(val >= pivot) ? val : neg_inf" in kernel


def test_sums_over_gpus_call_what_is_there() -> None:
    """See shared_sums.py. Of the two algorithms, the first one, which adds in the order of ranks, runs up to the sizes
    that the table has; the second one begins at its own rank."""
    from flashinfer import comm

    calls: dict[str, tuple[Any, ...]] = {
        "vllm_meta_size": (),
        "vllm_init_custom_ar": ([1, 2], torch.zeros(1), 0, True),
        "vllm_register_buffer": (1, [1, 2]),
        "vllm_all_reduce": (1, torch.zeros(1), torch.zeros(1), 1, 16, 36),
    }
    for name, args in calls.items():
        inspect.signature(getattr(comm, name)).bind(*args)
    from flashinfer.comm.cuda_ipc import CudaRTLibrary, cudaIpcMemHandle_t

    for name, args in {
        "cudaMalloc": (16,),
        "cudaMemset": (None, 0, 16),
        "cudaIpcGetMemHandle": (None,),
        "cudaIpcOpenMemHandle": (None,),
    }.items():
        inspect.signature(getattr(CudaRTLibrary, name)).bind(None, *args)
    assert bytes(cudaIpcMemHandle_t.from_buffer_copy(bytes(range(128)))) == bytes(range(128))
    source = " ".join((HEADERS / "comm" / "vllm_custom_all_reduce.cuh").read_text().replace("\\\n", " ").split())
    rule = source[source.index("if (world_size_ == 2) {") :]
    assert rule.startswith(
        "if (world_size_ == 2) { KL(ngpus, cross_device_reduce_1stage); } else if (full_nvlink_) { "
        "if ((world_size_ <= 4 && bytes < 512 * 1024) || (world_size_ <= 8 && bytes < 256 * 1024)) { "
        "KL(ngpus, cross_device_reduce_1stage);"
    )
    assert shared_sums.LARGEST == {2: 8 << 20, 4: 512 * 1024 - 1, 8: 256 * 1024 - 1}
    first = source[source.index("cross_device_reduce_1stage(RankData") :].partition("__global__")[0]
    assert "(const P**)&dp.ptrs[0], idx)" in first
    assert "upcast(ptrs[0][idx])" in source
    assert int(re.search(r"kMaxBlocks = (\d+)", source)[1]) >= shared_sums.CTAS  # type: ignore[index]
