"""Strings in, results out: `jkv.load`, `generate`, `stream`, `LLM.run`, on a tiny checkpoint."""

import dataclasses
import json
import math
import subprocess
import sys
from typing import Any

import jax
import numpy as np
import pytest

import jkv
from checkpoints import VOCAB_SIZE, config, random_tensors, save_hf, save_tensors
from jkv import GenerationConfig, Piece, Result
from jkv.engine import Request
from jkv.loop import Programs

EOS = 1
TEXT = "the quick brown fox"
NEW = 24
EVICT = "gkv:budget=24,window=8,interval=8"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_hf(tmp_path_factory.mktemp("api") / "tiny", config(), seed=0)


@pytest.fixture(scope="module")
def llm(folder):
    llm = jkv.load(folder)
    tokens = draw(llm, [llm.encode(TEXT, raw=True)])[0].tokens
    assert len(tokens) == NEW and len(set(tokens)) > 15  # text that a fault would change
    return llm


def ids(length: int, *, seed: int = 0) -> list[int]:
    """A prompt of random ids, without BOS and EOS."""
    return np.random.default_rng(seed).integers(2, VOCAB_SIZE, length).tolist()


def draw(llm: jkv.LLM, prompts: list[list[int]], *, policy: str = "full", **options: Any) -> list[Result]:
    """Results in the order of prompts and samples; what is no argument of `LLM.run` is a `GenerationConfig` field."""
    run = {name: options.pop(name) for name in ("samples", "slots", "rows", "on_kept") if name in options}
    asked = GenerationConfig(**{"max_new_tokens": NEW, **options})
    results = [event for event in llm.run(prompts, policy=policy, config=asked, **run) if isinstance(event, Result)]
    return sorted(results, key=lambda result: (result.prompt, result.sample))


def tokens(results: list[Result]) -> list[tuple[int, ...]]:
    return [result.tokens for result in results]


def changed(llm: jkv.LLM, *, generation: dict[str, Any] | None = None, **model: Any) -> jkv.LLM:
    """The same model with another generation config, or other fields of its config; it compiles for itself."""
    checkpoint = llm.checkpoint
    if generation is not None:
        checkpoint = dataclasses.replace(checkpoint, generation=generation)
    checkpoint = dataclasses.replace(checkpoint, config=dataclasses.replace(checkpoint.config, **model))
    return dataclasses.replace(llm, checkpoint=checkpoint, programs=Programs())


# Importing


def test_importing_starts_no_backend_and_imports_no_heavy_package():
    script = """
import sys
import jkv
assert "jax" not in sys.modules
jkv.load, jkv.generate, jkv.Policy, jkv.get_policy("gkv")
import jkv.commands.generate
heavy = {"torch", "transformers", "orbax", "tensorstore"} & sys.modules.keys()
assert not heavy, heavy
import jax
jax.config.update("jax_num_cpu_devices", 3)  # refused once a backend has started
assert jax.device_count() == 3
"""
    subprocess.run([sys.executable, "-W", "error", "-c", script], check=True)


def test_every_public_name_is_there():
    assert all(hasattr(jkv, name) for name in jkv.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        jkv.nothing  # noqa: B018


# Text


def test_streamed_pieces_are_the_generated_text(llm):
    settings = GenerationConfig(max_new_tokens=NEW)
    pieces = list(jkv.stream(llm, TEXT, raw=True, config=settings))
    result = jkv.generate(llm, TEXT, raw=True, config=settings)[0]
    assert len(pieces) > 5 and all(pieces)
    assert "".join(pieces) == result.text == llm.tokenizer.decode(result.tokens)


def test_pieces_of_a_batch_belong_to_their_rows(llm):
    texts: dict[tuple[int, int], str] = {}
    results = []
    run = llm.run([ids(5), ids(9), ids(3)], samples=2, config=GenerationConfig(max_new_tokens=6, temperature=1.0))
    for event in run:
        key = event.prompt, event.sample
        if isinstance(event, Piece):
            assert key not in {(result.prompt, result.sample) for result in results}
            texts[key] = texts.get(key, "") + event.text
        else:
            results.append(event)
    assert len(results) == 6
    assert all(texts[result.prompt, result.sample] == result.text for result in results)


def test_a_chat_and_a_text_are_told_apart(llm):
    chat = [{"role": "user", "content": "hi"}]
    expected = llm.encode("hi")
    assert llm.encode(chat) == expected != llm.encode("hi", raw=True)
    assert len(llm.encode("hi", system="be brief")) > len(expected)
    assert llm.encode("hi", arguments={"enable_thinking": False}) != expected
    settings = GenerationConfig(max_new_tokens=3)
    results = jkv.generate(llm, [chat, "hi"], config=settings)
    assert tokens(results)[0] == tokens(results)[1] == tokens(jkv.generate(llm, chat, config=settings))[0]
    with pytest.raises(ValueError, match="chat template"):
        llm.encode(chat, raw=True)


def test_an_early_end_of_a_stream_leaves_nothing_behind(llm):
    settings = GenerationConfig(max_new_tokens=200)
    pieces = jkv.stream(llm, TEXT, raw=True, config=settings)
    assert next(pieces)
    pieces.close()
    again = jkv.stream(llm, TEXT, raw=True, config=settings)
    assert next(again) == jkv.generate(llm, TEXT, raw=True, config=settings)[0].text[:1]


# Batches


def test_a_row_is_the_same_in_any_batch(llm):
    prompts = [ids(31, seed=1), ids(2, seed=2), ids(17, seed=3)]
    together = tokens(draw(llm, prompts))
    assert together == [tokens(draw(llm, [prompt], slots=1))[0] for prompt in prompts]
    assert together == tokens(draw(llm, prompts[::-1]))[::-1]
    assert len(set(together)) == 3


def test_more_rows_than_slots_compile_two_programs_more(llm):
    llm = changed(llm)
    prompts = [ids(3 + index, seed=index) for index in range(9)]
    first = tokens(draw(llm, prompts[:4], slots=4))
    compiled = list(llm.programs.names)
    results = draw(llm, prompts, slots=4)
    assert llm.programs.names == [*compiled, "read_layer", "admit"] and compiled.count("decode") == 1
    assert [result.prompt for result in results] == list(range(9))
    assert tokens(results)[:4] == first
    assert tokens(results) == tokens(draw(llm, prompts[::-1], slots=4))[::-1]
    assert len(llm.programs.names) == len(compiled) + 2


def test_few_programs_for_many_lengths(llm):
    llm = changed(llm)
    lengths = range(1, 121, 6)
    assert len(lengths) == 20
    for _ in range(2):
        for length in lengths:
            draw(llm, [ids(length)], policy=EVICT, max_new_tokens=10)
        names = llm.programs.names
        assert names.count("decode") == 1 and names.count("compact_store") == 1
        assert len(names) == 3 + 2  # lengths fall into three buckets: 32, 64 and 128


def test_padding_to_a_bucket_changes_nothing(llm):
    for length in (31, 32, 33):
        prompt = ids(length, seed=7)
        drawn = tokens(draw(llm, [prompt], max_new_tokens=1))[0][0]
        assert drawn == llm.logits(np.array([prompt]))[0, -1].argmax()


def test_ends_of_rows_are_their_own(llm):
    prompts = [ids(5, seed=5), ids(40, seed=2), ids(9, seed=3)]
    free = tokens(draw(llm, prompts))
    end = free[0][6]
    assert free[0].index(end) == 6 and end not in free[1] + free[2]
    results = draw(changed(llm, generation={"eos_token_id": end}), prompts)
    assert [len(result.tokens) for result in results] == [7, NEW, NEW]
    assert [result.finish_reason for result in results] == ["stop", "length", "length"]
    assert tokens(results) == [free[0][:7], *free[1:]]


# Sampling


def test_samples_differ_and_depend_on_nothing_but_seed_and_row(llm):
    prompts = [ids(6, seed=1), ids(20, seed=2)]
    settings = {"samples": 3, "temperature": 1.0, "max_new_tokens": 8}
    results = draw(llm, prompts, **settings)
    assert [(result.prompt, result.sample) for result in results] == [(p, s) for p in range(2) for s in range(3)]
    drawn = tokens(results)
    assert len(set(drawn)) == 6
    assert tokens(draw(llm, prompts, slots=2, **settings)) == drawn
    assert tokens(draw(llm, prompts, slots=2, rows=[5, 0, 3, 1, 4, 2], **settings)) == drawn
    assert tokens(draw(llm, prompts, rows=[4], **settings)) == [drawn[4]]


def test_seeds(llm):
    prompt = [ids(6)]
    settings = {"temperature": 1.0, "max_new_tokens": 8}
    drawn = [tokens(draw(llm, prompt, seed=seed, **settings))[0] for seed in (0, 1, 2**32, 2**63 - 1, 0)]
    assert drawn[0] == drawn[-1] and len(set(drawn)) == 4


def test_a_tiny_temperature_is_greedy(llm):
    assert tokens(draw(llm, [ids(6)], temperature=1e-6, top_p=0.9, top_k=5)) == tokens(draw(llm, [ids(6)]))


def test_the_generation_config_counts_where_it_asks_for_sampling(llm):
    quiet = changed(llm, generation={"temperature": 0.6, "top_p": 0.95})
    assert quiet.default_config() == GenerationConfig()
    asking = changed(llm, generation={"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": None})
    assert asking.default_config() == GenerationConfig(temperature=0.6, top_p=0.95)
    assert asking.default_config(temperature=0.0, seed=3) == GenerationConfig(temperature=0.0, top_p=0.95, seed=3)
    assert changed(llm, generation={"do_sample": True}).default_config().temperature == 1.0


# Ends


def test_a_stop_string_ends_the_text_before_it(llm):
    prompt = llm.encode(TEXT, raw=True)
    free = draw(llm, [prompt])[0]
    pieces = [llm.tokenizer.decode(free.tokens[:count]) for count in range(NEW + 1)]
    # From the middle of one token into the next, past anything that text before holds.
    count = next(n for n in range(3, NEW) if free.text.startswith(pieces[n]) and len(pieces[n]) > len(pieces[n - 1]))
    end = len(pieces[count])
    stop = free.text[end - 1 : end + 1]
    assert free.text.index(stop) == end - 1
    settings = GenerationConfig(max_new_tokens=NEW, stop=("never there", stop))
    result = jkv.generate(llm, TEXT, raw=True, config=settings)[0]
    assert result.finish_reason == "stop"
    assert result.text == free.text[: end - 1] == "".join(jkv.stream(llm, TEXT, raw=True, config=settings))
    assert result.tokens == free.tokens[: len(result.tokens)] and count < len(result.tokens) < NEW


def test_any_of_several_end_tokens_ends_an_answer(llm):
    prompt = [ids(5, seed=5)]
    free = tokens(draw(llm, prompt))[0]
    assert free.index(free[5]) == 5 and EOS not in free
    ending = changed(llm, generation={"eos_token_id": [EOS, free[5], free[9]]})
    assert ending.eos_ids == (EOS, free[5], free[9])
    for policy in ("full", EVICT):
        result = draw(ending, prompt, policy=policy)[0]
        assert (result.tokens, result.finish_reason) == (free[:6], "stop")
    result = draw(ending, prompt, ignore_eos=True)[0]
    assert (result.tokens, result.finish_reason) == (free, "length")


def test_the_model_configs_end_token_counts_where_the_generation_config_has_none(llm):
    assert changed(llm, generation={}).eos_ids == (EOS,)
    assert changed(llm, generation={}, eos_ids=()).eos_ids == llm.tokenizer.eos_ids == (EOS,)


def test_an_end_token_inside_a_prompt_is_a_token_like_others(llm):
    prompt = ids(12, seed=4)
    inside = [*prompt[:4], EOS, *prompt[4:]]
    results = draw(llm, [inside, prompt])
    assert all(len(result.tokens) == NEW for result in results)
    assert tokens(results) == tokens(draw(llm, [inside])) + tokens(draw(llm, [prompt]))
    assert results[0].prompt_tokens == 13


def test_one_new_token_needs_no_decoding(llm):
    llm = changed(llm)
    run = llm.run([ids(5)], config=GenerationConfig(max_new_tokens=1))
    result = next(event for event in run if isinstance(event, Result))
    assert (len(result.tokens), result.finish_reason) == (1, "length")
    assert "decode" not in llm.programs.names
    assert run.stats.tokens_per_second is None and run.stats.decode_seconds == 0


def test_a_text_ends_where_the_model_reads_no_further(llm):
    llm = changed(llm, max_position=40)
    results = draw(llm, [ids(30), ids(38), ids(39)])
    assert [len(result.tokens) for result in results] == [10, 2, 1]
    assert all(result.finish_reason == "length" for result in results)
    with pytest.raises(ValueError, match=r"prompt 1 has 40 tokens; the model reads at most 40"):
        llm.run([ids(3), ids(40)])


def test_reasoning_is_split_off(tmp_path, llm):
    plain, thinking = ids(5, seed=5), [*ids(5, seed=5), llm.tokenizer.backend.token_to_id("<think>")]
    free = draw(llm, [plain, thinking])
    assert (free[0].reasoning, free[0].answer) == (None, free[0].text)
    assert (free[1].reasoning, free[1].answer) == (free[1].text, None)  # it never came to its end
    # Exchanges two rows of the head, so that the marker is drawn in the place of another token.
    end, other = llm.tokenizer.backend.token_to_id("</think>"), free[1].tokens[9]
    assert free[1].tokens.index(other) == 9 and end not in free[1].tokens
    tensors = random_tensors(config(), seed=0)
    tensors["lm_head.weight"][[end, other]] = tensors["lm_head.weight"][[other, end]]
    save_tensors(save_hf(tmp_path, config()), tensors)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text("utf-8"))
    for token in tokenizer["added_tokens"]:
        token["special"] &= "think" not in token["content"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), "utf-8")
    ended = draw(jkv.load(tmp_path), [thinking])[0]
    assert ended.reasoning == llm.tokenizer.decode(free[1].tokens[:9]) and ended.answer
    assert ended.reasoning + "</think>" + ended.answer == ended.text


# Numbers


def test_statistics_can_be_recomputed(llm):
    prompts = [ids(5), ids(30), ids(12)]
    run = llm.run(prompts, policy=EVICT, slots=2, config=GenerationConfig(max_new_tokens=NEW))
    results = [event for event in run if isinstance(event, Result)]
    report = run.stats.report()
    assert report["prompt_tokens"] == 47 == sum(result.prompt_tokens for result in results)
    assert report["new_tokens"] == 3 * NEW == sum(len(result.tokens) for result in results)
    assert report["decoded_tokens"] == 3 * (NEW - 1)
    assert min(report["prefill_seconds"], report["decode_seconds"]) > 0
    assert report["tokens_per_second"] == report["decoded_tokens"] / report["decode_seconds"]
    assert run.stats.longest_text == 30 + NEW
    assert report.pop("tokens_read_per_step") == run.stats.plan.tokens_read
    assert all(value is None or math.isfinite(value) for value in report.values())


def test_compiling_is_counted_apart(llm):
    llm = changed(llm)
    seconds = []
    for _ in range(2):
        run = llm.run([ids(5)], config=GenerationConfig(max_new_tokens=4))
        list(run)
        seconds.append(run.stats.compile_seconds)
    assert seconds[0] == llm.programs.seconds > 0 == seconds[1]


@pytest.mark.parametrize("policy", ["full", EVICT, "h2o:budget=24,interval=8"])
def test_bytes_held_are_those_of_the_arrays(llm, policy):
    run = llm.run([ids(5), ids(30)], policy=policy, config=GenerationConfig(max_new_tokens=NEW))
    width = np.zeros((2, 32), np.int32)
    sizes = (np.array([5, 30], np.int32), np.full(2, NEW, np.int32), np.arange(2, dtype=np.uint32))
    request = Request(np.zeros(2, np.uint32), np.full(8, -1, np.int32))
    state, _ = run.engine.prefill(llm.weights, width, *sizes, request)
    plan, c = run.stats.plan, llm.checkpoint.config
    arrays = jax.tree.leaves(state.stores)
    assert plan.kv_held + plan.metadata_held == sum(array.nbytes for array in arrays)
    assert plan.kv_held == 2 * c.num_layers * c.num_kv_heads * plan.capacity * c.head_dim * 4 * 2
    assert plan.weights == sum(array.nbytes for array in jax.tree.leaves(llm.weights))
    assert plan.capacity == (512 if policy == "full" else 32)
    assert plan.kv_read == c.kv_bytes_per_token(4) * min(plan.capacity, 30 + NEW)


def test_kept_positions_are_reported_after_every_compaction(llm):
    kept = []
    on_kept = lambda row, step, positions: kept.append((row.id, step, positions))  # noqa: E731
    prompts = [ids(40), ids(6), ids(33)]
    draw(llm, prompts, policy=EVICT, ignore_eos=True, on_kept=on_kept, slots=2)
    assert sorted((row, step) for row, step, _ in kept) == [(row, step) for row in range(3) for step in (0, 8, 16, 24)]
    for row, step, positions in kept:
        assert positions.shape == (2, 2, 32)  # layers, heads, slots
        seen = len(prompts[row]) + min(step, NEW - 1)  # the last token is drawn and never read
        held = positions[positions >= 0].reshape(2, 2, -1)
        assert held.shape[-1] == min(seen, 24)
        assert np.all(np.diff(held) > 0)
        assert np.array_equal(held[..., -8:], np.broadcast_to(np.arange(seen)[-8:], held[..., -8:].shape))


def test_half_precision_runs_twice_the_same(folder):
    llm = jkv.load(folder, dtype="bfloat16")
    assert llm.dtype == "bfloat16" and {str(x.dtype) for x in jax.tree.leaves(llm.weights)} == {"bfloat16"}
    assert tokens(draw(llm, [ids(9), ids(3)])) == tokens(draw(llm, [ids(9), ids(3)]))
    assert llm.logits(np.array([ids(9)])).dtype == np.float32


# Refusals


def test_logits_that_are_not_finite_are_refused_by_layer_and_step(tmp_path, folder):
    tensors = random_tensors(config(), seed=0)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 0] = np.nan
    save_tensors(save_hf(tmp_path, config()), tensors)
    with pytest.raises(ValueError, match=r"non-finite logits at step 0 of row 0 \(layer 1\).*--dtype float32"):
        jkv.generate(jkv.load(tmp_path), TEXT, raw=True)


def test_a_token_that_breaks_decoding_is_found(tmp_path, llm):
    prompts = [ids(3), ids(5, seed=5)]
    drawn = draw(llm, prompts, ignore_eos=True)[1].tokens
    bad = drawn[NEW - 4]
    assert drawn.index(bad) == NEW - 4 and bad not in prompts[0] + prompts[1] + [*draw(llm, prompts)[0].tokens]
    tensors = random_tensors(config(), seed=0)
    tensors["model.embed_tokens.weight"][bad] = np.inf
    save_tensors(save_hf(tmp_path, config()), tensors)
    with pytest.raises(ValueError, match=rf"at step {NEW - 3} of row 1 \(embedding\)"):
        draw(jkv.load(tmp_path), prompts, ignore_eos=True)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens=0 must be a whole number"),
        ({"seed": -1}, "seed=-1 must be an integer from 0"),
        ({"seed": 2**63}, "seed=9223372036854775808 must be"),
        ({"temperature": -0.1}, "temperature=-0.1 must be a finite number >= 0"),
        ({"temperature": math.nan}, "temperature=nan must be"),
        ({"top_p": 1.5}, "top_p=1.5 must be between 0 and 1"),
        ({"stop": ("a", "")}, "a stop string is empty"),
        ({"stop": "END"}, "stop=.END. must be a tuple"),
    ],
)
def test_bad_settings_are_refused(fields, message):
    with pytest.raises(ValueError, match=message):
        GenerationConfig(**fields)


def test_bad_requests_are_refused(llm):
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        llm.run([ids(3), []])
    for bad in (-1, VOCAB_SIZE):
        with pytest.raises(ValueError, match="prompt 1 has token ids that the model does not"):
            llm.run([ids(3), [5, bad]])
    for raw in (True, False):
        with pytest.raises(ValueError, match="half a character"):
            jkv.generate(llm, "a\ud800b", raw=raw)
    with pytest.raises(ValueError, match="slots=0 and samples=1"):
        llm.run([ids(3)], slots=0)
    with pytest.raises(ValueError, match="'nothing' does not exist"):
        llm.run([ids(3)], policy="nothing")
    assert jkv.generate(llm, []) == []


def test_a_model_without_a_tokenizer_is_refused(tmp_path):
    save_hf(tmp_path, config())
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        jkv.load(tmp_path)


def test_a_policy_may_be_an_object(llm):
    policy = jkv.get_policy(EVICT)
    assert tokens(draw(llm, [ids(40)], policy=policy)) == tokens(draw(llm, [ids(40)], policy=EVICT))
    assert tokens(draw(llm, [ids(40)], policy=EVICT)) != tokens(draw(llm, [ids(40)]))
