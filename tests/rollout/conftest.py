import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from rla_lightning.rollout.drawing import draw
from rla_lightning.rollout.randomness import uniforms

SPECIAL = ["<pad>", "</s>", "<unk>", "<act>", "<judge>", "<value>"]
WORDS = [
    "#look",
    "#good",
    "#bad",
    "+1",
    "-1",
    "go",
    "take",
    "put",
    "open",
    "left",
    "right",
    "cabinet_1",
    "cabinet_2",
    "apple_1",
    "mug_1",
    "desk",
    "at",
    "goal",
    "reach",
    "far",
    "near",
]


def build_tokenizer(pad_token: str = "<pad>") -> PreTrainedTokenizerFast:
    words = SPECIAL + WORDS
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=pad_token,
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<act>", "<judge>", "<value>"],
    )


def build_model(vocab_size: int, seed: int = 0, width: int = 32, layers: int = 2, scale: float = 0.2) -> Qwen2ForCausalLM:
    torch.manual_seed(seed)
    config = Qwen2Config(
        vocab_size=vocab_size,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=3 * width,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=scale,  # large, so that distributions are far from uniform
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=None,
    )
    return Qwen2ForCausalLM(config)


def recompute_one(model, prompt, seed, params, end_ids):
    """One row without cache, padding or batch: the whole sequence is computed again for every token."""
    model.eval()
    draws = uniforms(np.array([seed], dtype=np.uint64), params.max_new_tokens)[0]
    ids, logprobs = list(prompt), []
    for position in range(params.max_new_tokens):
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([ids])).logits[:, -1]
        token, logprob = draw(logits, torch.tensor([draws[position]]), params)
        ids.append(int(token))
        logprobs.append(float(logprob))
        if ids[-1] in end_ids:
            break
    return tuple(ids[len(prompt) :]), logprobs


@pytest.fixture(scope="session")
def recompute():
    return recompute_one


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny models are slower on several threads, far slower where cores are shared."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def make_tokenizer():
    return build_tokenizer


@pytest.fixture(scope="session")
def make_model():
    return build_model


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return build_tokenizer()


@pytest.fixture
def model(tokenizer: PreTrainedTokenizerFast) -> Qwen2ForCausalLM:
    return build_model(len(tokenizer))
