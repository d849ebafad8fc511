import dataclasses
import json
import weakref

import pytest
import torch

from benchmarks import train_gpt
from benchmarks._gpt import CHECKPOINTS, Config, Decoder, features_of
from benchmarks._training import Job, Settings

CPU = torch.device("cpu")
GPT2 = Config(2, 32, 4, 64, context=16, batch=3, vocab=97, dropout=0.1)
LLAMA = dataclasses.replace(GPT2, kv_heads=2)


def tokens(config=GPT2):
    return torch.randint(config.vocab, (500,))


def train(case, settings, data, steps=3):
    job = Job(case, settings, data, CPU)
    for _ in range(steps):
        job.step()
    return job


def assert_same(job, other, exact):
    parameters = [torch.cat([p.flatten() for p in j.model.parameters()]) for j in (job, other)]
    if exact:
        assert job.losses == other.losses and torch.equal(*parameters)
    else:  # for a few gradients near 0, the sign of Adam's step depends on rounding
        torch.testing.assert_close(job.losses, other.losses, rtol=1e-5, atol=0)
        assert (parameters[0] - parameters[1]).norm() < 1e-4 * parameters[1].norm()


@pytest.mark.in_turn
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_features_give_the_losses_of_the_plain_model(config, dtype):
    settings, data = Settings(config, 4, accumulate=2, dtype=dtype), tokens()
    plain = train("plain", settings, data)
    assert plain.losses[0] == pytest.approx(torch.tensor(97.0).log().item(), abs=0.2)
    for case in ("output_discard", *CHECKPOINTS):
        assert_same(train(case, settings, data), plain, exact=True)
    everything = train("all", settings, data)
    assert_same(train("traced+all", settings, data), everything, exact=True)
    if dtype == "float32":
        assert_same(train("linear_cross_entropy", settings, data), plain, exact=False)
        assert_same(everything, plain, exact=False)
    else:
        torch.testing.assert_close(everything.losses, plain.losses, rtol=2e-3, atol=0)


@pytest.mark.in_turn
def test_the_loss_over_200_steps_stays_within_a_thousandth_of_plain():
    settings, data = Settings(dataclasses.replace(LLAMA, dropout=0.0), 200), tokens()
    plain, everything = (train(case, settings, data, 200).losses for case in ("plain", "all"))
    assert max(abs(a - b) for a, b in zip(plain, everything, strict=True)) < 1e-3
    assert plain[-1] < plain[0] - 0.3


@pytest.mark.slow
def test_compiled_features_give_the_losses_of_plain():
    small = dataclasses.replace(LLAMA, layers=1, dropout=0.0)
    settings, data = Settings(small, 4), tokens()
    torch._dynamo.reset()
    assert_same(train("compile+all", settings, data), train("plain", settings, data), exact=False)


@pytest.mark.in_turn
@pytest.mark.parametrize("config", [GPT2, LLAMA], ids=["gpt2", "llama"])
def test_the_models_agree_with_transformers(config):
    transformers = pytest.importorskip("transformers")
    mine = Decoder(config, features_of("plain")).eval()
    with torch.no_grad():
        for p in mine.parameters():
            p.add_(0.1 * torch.randn_like(p))  # biases and norms too
    if config is GPT2:
        theirs = transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                vocab_size=config.vocab, n_positions=config.context, n_embd=config.width,
                n_layer=config.layers, n_head=config.heads, n_inner=config.hidden,
            )
        ).eval()  # fmt: skip
        pairs = [(theirs.transformer.wte, mine.tokens), (theirs.transformer.wpe, mine.places),
                 (theirs.transformer.ln_f, mine.norm)]  # fmt: skip
        for a, b in zip(theirs.transformer.h, mine.blocks, strict=True):
            pairs += [(a.ln_1, b.attention.norm), (a.ln_2, b.mlp.norm),
                      (a.attn.c_attn, b.attention.qkv), (a.attn.c_proj, b.attention.projection),
                      (a.mlp.c_fc, b.mlp.up), (a.mlp.c_proj, b.mlp.down)]  # fmt: skip
    else:
        theirs = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=config.vocab, hidden_size=config.width,
                intermediate_size=config.hidden, num_hidden_layers=config.layers,
                num_attention_heads=config.heads, num_key_value_heads=config.kv_heads,
                rms_norm_eps=1e-5, tie_word_embeddings=False,
            )
        ).eval()  # fmt: skip
        pairs = [(theirs.model.embed_tokens, mine.tokens), (theirs.model.norm, mine.norm),
                 (theirs.lm_head, mine.head)]  # fmt: skip
        for a, b in zip(theirs.model.layers, mine.blocks, strict=True):
            q, k, v = b.attention.qkv.weight.split(b.attention.sections)
            for layer, weight in ((a.self_attn.q_proj, q), (a.self_attn.k_proj, k),
                                  (a.self_attn.v_proj, v)):  # fmt: skip
                layer.weight.data = weight.detach()
            pairs += [(a.input_layernorm, b.attention.norm), (a.mlp.up_proj, b.mlp.up),
                      (a.post_attention_layernorm, b.mlp.norm), (a.mlp.gate_proj, b.mlp.gate),
                      (a.self_attn.o_proj, b.attention.projection),
                      (a.mlp.down_proj, b.mlp.down)]  # fmt: skip
    for a, b in pairs:
        turned = type(a).__name__ == "Conv1D"
        a.weight.data = (b.weight.T if turned else b.weight).detach()
        if getattr(b, "bias", None) is not None:
            a.bias.data = b.bias.detach()
    inputs = torch.randint(config.vocab, (3, config.context + 1))
    right = theirs(inputs[:, :-1]).logits.flatten(0, 1)
    right = torch.nn.functional.cross_entropy(right, inputs[:, 1:].flatten())
    torch.testing.assert_close(mine(inputs[:, :-1], inputs[:, 1:]), right)


def test_a_resumed_job_continues_exactly(tmp_path):
    settings, data = Settings(LLAMA, 6, accumulate=2), tokens()
    straight = train("all", settings, data, steps=6)
    first = Job("all", settings, data, CPU, tmp_path)
    assert not first.resume()
    for step in range(5):  # the last two steps are lost
        first.step()
        if step == 2:
            first.save()
    second = Job("all", settings, data, CPU, tmp_path)
    assert second.resume() and len(second.losses) == 3
    for _ in range(3):
        second.step()
    assert_same(second, straight, exact=True)
    log = [json.loads(line) for line in (tmp_path / "all.jsonl").read_text().splitlines()]
    assert [record["step"] for record in log] == [1, 2, 3, 4, 5, 6]
    assert [record["loss"] for record in log] == straight.losses
    other = Job("all", dataclasses.replace(settings, seed=1), data, CPU, tmp_path)
    with pytest.raises(ValueError, match=r"seed 0\. Expected 1"):
        other.resume()


def test_gradients_of_several_batches_are_those_of_one():
    job = Job(
        "all", Settings(dataclasses.replace(GPT2, dropout=0.0), 2, accumulate=2), tokens(), CPU
    )
    losses = [job.run(0, part) for part in range(2)]
    sums = {name: p.grad.clone() for name, p in job.model.named_parameters()}
    job.model.zero_grad()
    together = (torch.cat(pair) for pair in zip(*(job.batch(0, p) for p in range(2)), strict=True))
    loss = job.model(*together)
    loss.backward()
    torch.testing.assert_close(sum(losses), loss.detach())
    for name, p in job.model.named_parameters():
        torch.testing.assert_close(sums[name], p.grad, msg=name)


@pytest.mark.in_turn
def test_with_all_features_a_step_takes_less_memory_than_the_plain_logits():
    config = dataclasses.replace(GPT2, context=128, batch=8, vocab=30000)
    data = tokens(config)
    logits = config.batch * config.context * config.vocab * 4
    plain, everything = (Job(c, Settings(config, 2), data, CPU).memory() for c in ("plain", "all"))
    assert plain.peak_bytes > 2 * logits > 3 * everything.peak_bytes


@pytest.mark.in_turn
def test_the_jobs_of_a_group_are_freed_before_the_next_one(tmp_path, monkeypatch):
    alive, counts = weakref.WeakSet(), []

    class Counted(Job):
        def __init__(self, *args):
            super().__init__(*args)
            alive.add(self)
            counts.append(len(alive))

    monkeypatch.setattr(train_gpt, "Job", Counted)
    monkeypatch.setattr(torch, "compile", lambda model, **options: model)
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 40)
    command = ["--quick", "--device", "cpu", "--text", str(text), "--json", str(out)]
    command += ["--batch", "1", "--steps", "1", "--cases", "plain", "compile", "autochunk"]
    train_gpt.main(command)
    assert counts == [1, 1, 2, 1, 2]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("al", "'al'. Expected plain, all"),
        ("compile+autochunk", "autochunk+compile. Expected at most one"),
    ],
)
def test_unknown_and_contradicting_features_are_errors(case, message, capsys):
    with pytest.raises(SystemExit):
        train_gpt.main(["--cases", case])
    assert message in capsys.readouterr().err.replace("\n", " ")


@pytest.mark.in_turn
def test_the_command_trains_on_a_text_and_reports(tmp_path, capsys):
    text, out = tmp_path / "text", tmp_path / "out.json"
    text.write_text("the quick brown fox jumps over the lazy dog, 12 times\n" * 40)
    command = ["--quick", "--device", "cpu", "--text", str(text), "--json", str(out), "--keep"]
    command += ["--batch", "2", "--steps", "2"]
    folder = ["--folder", str(tmp_path / "run"), "--save-every", "1", "--resume"]
    train_gpt.main([*command, *folder, "--cases", "plain", "linear_cross_entropy", "liger"])
    train_gpt.main([*command, "--cases", "plain", "output_discard", "traced"])
    result = json.loads(out.read_text())
    rows = {row["case"]: row for row in result["rows"]}
    assert list(rows) == ["linear_cross_entropy", "plain", "output_discard", "traced"]
    assert rows["linear_cross_entropy"]["peak / plain"] < 1
    for case in ("output_discard", "traced"):
        assert rows[case]["loss apart"] == 0 and rows[case]["time / plain"] > 0
    highest = max(level for _, level in rows["plain"]["memory"])
    assert highest == pytest.approx(rows["plain"]["peak (MiB)"], abs=0.1)
    assert "liger: Liger-Kernel needs a GPU" in capsys.readouterr().out
    train_gpt.main([*command, *folder, "--cases", "plain", "linear_cross_entropy"])
    assert "plain: continues after step 2" in capsys.readouterr().out
    second = {row["case"]: row for row in json.loads(out.read_text())["rows"]}
    assert second["plain"]["last loss"] == rows["plain"]["last loss"]
    assert "time / plain" not in second["linear_cross_entropy"]
