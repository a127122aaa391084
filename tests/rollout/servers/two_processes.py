"""One of two gloo processes whose sharded model is sampled from a vLLM server; run by test_vllm.py."""

import sys
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from rla_lightning.models.language_model import LoadedModel
from rla_lightning.models.sharding import shard
from rla_lightning.rollout.servers.vllm import VllmServer
from rla_lightning.types import SamplingParams

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import build_model, build_tokenizer

PARAMS = SamplingParams(max_new_tokens=5)


def worst(plain, sampler, key):
    """Largest gap between the server's log-probs and those of an unsharded copy."""
    prompt = (6, 7, 8, 9)
    (drawn,) = sampler.sample([prompt], 6, PARAMS, [key])
    gaps = []
    for completion in drawn:
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([[*prompt, *completion.token_ids]])).logits[0, len(prompt) - 1 : -1]
        ours = logits.log_softmax(-1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        gaps.append(float((ours - torch.tensor(completion.logprobs)).abs().max()))
    return max(gaps)


def change(model, seed):
    """The same change of a plain and of a sharded model: scaling works on shards alone."""
    factors = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            factor = 1 + 0.5 * float(torch.rand((), generator=factors))
            if "lora_" in name or not any("lora_" in other for other, _ in model.named_parameters()):
                parameter.mul_(factor)


def check(kind: str, url: str, rank: int) -> None:
    tokenizer = build_tokenizer()

    def make():
        model = build_model(len(tokenizer), seed=3, width=128, scale=0.1)
        if kind == "full":
            return model
        model = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
        torch.manual_seed(5)
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                torch.nn.init.normal_(parameter, std=0.1)
        return model

    plain, model = make().eval(), make()
    sampler = VllmServer(url=url).build(LoadedModel(model, tokenizer, 256), "policy")
    assert (first := worst(plain, sampler, f"{rank}/0")) < 1e-3, first
    shard(model, init_device_mesh("cpu", (2,), mesh_dim_names=("data_parallel",)))
    for seed in range(2):
        dist.barrier()  # the other one may still be sampling from the weights so far
        change(plain, seed)
        assert worst(plain, sampler, f"{rank}/old") > 0.01
        change(model, seed)
        dist.barrier()
        sampler.update_weights(model)
        assert (after := worst(plain, sampler, f"{rank}/{seed}")) < 1e-3, after
    dist.barrier()


if __name__ == "__main__":
    url, store, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    for kind in ("full", "lora"):
        check(kind, url, rank)
    print("all equal")
    dist.destroy_process_group()
