"""Environments: the file that lists them, their turns, and rewards over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.core.config.errors import ConfigError, DataError
from megatron.post_training.rl.environment import (
    Environment,
    FunctionEnvironment,
    HttpEnvironment,
    Prompt,
    RewardServiceError,
    Task,
    open_environments,
)
from megatron.post_training.rl.generate import PromptSource, check_prompts
from megatron.training.tokenizer import MegatronTokenizer, TokenizerSpec, create_tokenizer
from megatron.training.tokenizer.chat import ChatTemplate

HERE = __name__


class Numbers(Environment):
    """Prompts "0" to ``count`` - 1; the reward is that of the arguments."""

    def __init__(self, count: int = 4, reward: object = 1.0) -> None:
        self._reward = reward
        self.prompts = [str(i) for i in range(count)]

    def reward(self, prompt: Prompt, answer: str) -> float:
        return self._reward  # type: ignore[return-value]


class WithoutReward(Environment):
    prompts = ("1",)


class WithoutPrompts(Environment):
    def reward(self, prompt: Prompt, answer: str) -> float:
        return 1.0


def opened(tmp_path: Path, content: object, seed: int = 1) -> Any:
    path = tmp_path / "environments.yaml"
    path.write_text(json.dumps(content))
    return open_environments(str(path), seed)


def test_tasks_are_a_function_of_seed_and_index(tmp_path: Path) -> None:
    content = [{"agent_type": f"{HERE}.Numbers", "agent_args": {"count": 5}}]
    first = [task.text for task in opened(tmp_path, content).tasks(0, 15)]
    assert [sorted(first[i : i + 5]) for i in (0, 5, 10)] == [list("01234")] * 3
    assert first[:5] != first[5:10]
    again = opened(tmp_path, content)
    assert [task.text for task in again.tasks(7, 8)] == first[7:]
    assert [task.text for task in again.tasks(2, 3)] == first[2:5]
    assert [task.text for task in opened(tmp_path, content, seed=2).tasks(0, 15)] != first


REWARDS = """
from dataclasses import dataclass

@dataclass
class Scale:
    factor: "float" = 10.0

def reward(prompt, answer):
    return Scale().factor * (answer == str(prompt["result"]))

def length(completions, **columns):
    assert columns["result"] == [2] and columns["prompts"] == ["1 + 1 = "], columns
    return [float(len(completion)) for completion in completions]

def first(prompts, completions):
    return [float(completions[0][0]["content"] == prompts[0][0]["content"])]

def silent(completions, **columns):
    return [None for _ in completions]

number = 3
dict = dict
"""
SUM = {"prompt": "1 + 1 = ", "result": 2}
CHAT = {"prompt": [{"role": "user", "content": "Hi"}]}


def functions_entry(tmp_path: Path, functions: object, row: object = SUM) -> Any:
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "prompts.jsonl").write_text(json.dumps(row) + "\n")
    if isinstance(functions, str):
        functions = f"{tmp_path}/{functions}"
    elif isinstance(functions, list):
        functions = [f"{tmp_path}/{name}" for name in functions]
    elif isinstance(functions, dict):
        functions = {f"{tmp_path}/{name}": weight for name, weight in functions.items()}
    arguments = {"functions": functions, "prompts": str(tmp_path / "prompts.jsonl")}
    return opened(tmp_path, [{"agent_type": "functions", "agent_args": arguments}])


@pytest.mark.feature("RL: rewards are functions of a file, with weights, also of TRL's signature")
@pytest.mark.parametrize(
    ("functions", "row", "answer", "expected"),
    [
        ("rewards.py:reward", SUM, "2", 10.0),
        ("rewards.py:reward", SUM, "3", 0.0),
        ("rewards.py:length", SUM, "three", 5.0),
        (["rewards.py:reward", "rewards.py:length"], SUM, "2", 11.0),
        ({"rewards.py:reward": 0.5, "rewards.py:length": -1}, SUM, "2", 4.0),
        (["rewards.py:silent", "rewards.py:length"], SUM, "2", 1.0),
        ("rewards.py:first", CHAT, "Hi", 1.0),
    ],
)
def test_functions_of_a_file_reward_answers(
    functions: object, row: object, answer: str, expected: float, tmp_path: Path
) -> None:
    (task,) = functions_entry(tmp_path, functions, row).tasks(0, 1)
    assert task.reward(answer) == expected


@pytest.mark.parametrize(
    ("functions", "message"),
    [
        ("missing.py:reward", "missing.py: no such file; correct the path"),
        ("rewards.py:missing", "rewards.py defines no missing; correct the name"),
        ("rewards.py:number", "it is 3, no function: correct the name"),
        ("rewards.py", "write MODULE:NAME or FILE.py:NAME"),
        ([], "functions is empty: name at least one function"),
        ({"rewards.py:reward": "much"}, "its weight is 'much': give a number"),
        ({"rewards.py:reward": 10**400}, "its weight is 1000"),
        ("rewards.py:Scale", "cannot be called with a prompt and an answer (too many positional"),
        ("rewards.py:dict", "cannot be called with a prompt and an answer (no signature found"),
    ],
)
def test_wrong_functions_are_refused(functions: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="functions") as error:
        functions_entry(tmp_path, functions)
    assert message in str(error.value)
    with pytest.raises(ConfigError, match="functions 5: write MODULE:NAME or FILE.py:NAME"):
        FunctionEnvironment([5], str(tmp_path / "prompts.jsonl"))  # type: ignore[list-item]


@pytest.mark.parametrize("num_threads", [0, -1, "many", True])
def test_a_wrong_number_of_threads_is_refused(num_threads: object, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "a"}))
    for kind, named in (("functions", {"functions": "os:stat"}), ("http", {"url": "http://x"})):
        arguments = {**named, "prompts": str(path), "num_threads": num_threads}
        with pytest.raises(ConfigError, match=f"num_threads {num_threads!r}: give a number above"):
            opened(tmp_path, [{"agent_type": kind, "agent_args": arguments}])


def test_an_answer_that_no_function_rewards_ends_the_run(tmp_path: Path) -> None:
    (task,) = functions_entry(tmp_path, "rewards.py:silent").tasks(0, 1)
    with pytest.raises(DataError, match="is nan: return a finite number"):
        task.reward("2")


@pytest.mark.feature("RL: wrong prompts of a file are reported before the first step, with line")
@pytest.mark.parametrize("held_out", [False, True])
def test_wrong_prompts_of_a_file_are_reported_at_once(tmp_path: Path, held_out: bool) -> None:
    rows = [{"prompt": "1 2"}, {"text": "1"}, {"prompt": "1 " * 9}]
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "{\n")
    arguments = {"url": "http://x", "prompts": str(path)}
    entry = {"agent_type": "http", "agent_args": arguments, "evaluation_only": held_out}
    environments = opened(tmp_path, [entry, {"agent_type": f"{HERE}:Numbers"}])
    tokenizer = create_tokenizer(TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=20))
    config: Any = SimpleNamespace(data=SimpleNamespace(seq_length=8))
    with pytest.raises(DataError) as error:
        check_prompts(config, PromptSource(environments, tokenizer, None))
    count, *found = str(error.value).splitlines()
    assert count == "3 of 4 prompts are wrong:"
    assert [line.split(": ")[0] for line in found] == [f"{path}, line {n}" for n in (2, 3, 4)]
    assert "has 9 tokens: give 1 to 7, or raise --seq-length 8" in found[1]


def test_held_out_environments_have_no_share_of_the_prompts(tmp_path: Path) -> None:
    content = [
        {"agent_type": f"{HERE}:Numbers", "agent_args": {"count": count}, "evaluation_only": held}
        for count, held in ((4, False), (3, True), (2, True))
    ]
    found = opened(tmp_path, content)
    assert [len(environment.prompts) for environment in found.held_out] == [3, 2]
    assert {len(task.environment.prompts) for task in found.tasks(0, 20)} == {4}
    with pytest.raises(ConfigError, match="all environments have evaluation_only: give one to"):
        opened(tmp_path, content[1:])
    content[1]["evaluation_only"] = "yes"
    with pytest.raises(ConfigError, match="entry 1: evaluation_only 'yes': give true or false"):
        opened(tmp_path, content)


def test_environments_take_turns_by_their_weights(tmp_path: Path) -> None:
    content = [
        {"agent_type": f"{HERE}:Numbers", "agent_args": {"reward": reward}, "weight": weight}
        for reward, weight in ((0, 1), (1, 3))
    ]
    rewards = [task.reward("") for task in opened(tmp_path, content).tasks(0, 40)]
    assert sum(rewards) == 30
    assert sum(rewards[:20]) == 15


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({}, "write a list of environments"),
        ([{"agent": 1}], "entry 0 is {'agent': 1}: give agent_type"),
        ([{"agent_type": "nothing_here.A"}], "No module named 'nothing_here'"),
        ([{"agent_type": f"{HERE}.Missing"}], "defines no Missing"),
        ([{"agent_type": f"{HERE}.opened"}], "is no class that derives from"),
        ([{"agent_type": f"{HERE}.Numbers", "agent_args": {"size": 1}}], "'size'; correct the arg"),
        ([{"agent_type": f"{HERE}.Numbers", "agent_args": {"count": 0}}], "has no prompts"),
        ([{"agent_type": f"{HERE}.WithoutReward"}], "does not define reward(): define it"),
        ([{"agent_type": f"{HERE}.WithoutPrompts"}], "no attribute prompts: set it in __init__()"),
        ([{"agent_type": f"{HERE}.Numbers", "weight": 0}], "weight 0: give a number above 0"),
        ([{"agent_type": f"{HERE}.Numbers", "weight": 10**400}], "weight 1000"),
        ([{"agent_type": "http", "agent_args": {"url": "x", "prompts": "y"}}], "begins with http"),
    ],
)
def test_a_wrong_file_is_refused(content: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--langrl-env-config|url") as error:
        opened(tmp_path, content)
    assert message in str(error.value)


@pytest.mark.parametrize("reward", [float("nan"), None, "good"])
def test_a_reward_that_is_no_number_is_refused(reward: object) -> None:
    with pytest.raises(DataError, match="return a finite number"):
        Task(Numbers(reward=reward), "0").reward("answer")


class Service(BaseHTTPRequestHandler):
    """Reward the length of the answer; statuses of `failures` come first."""

    failures: list[int] = []
    body = b""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        status = Service.failures.pop(0) if Service.failures else 200
        self.send_response(status)
        self.end_headers()
        reward = {"reward": len(asked["answer"]) + asked["prompt"]["bonus"]}
        self.wfile.write(Service.body or json.dumps(reward).encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    Service.failures = []
    Service.body = b""
    server = HTTPServer(("127.0.0.1", 0), Service)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/reward"
    server.shutdown()
    thread.join()
    server.server_close()


def asked(url: str, tmp_path: Path, **options: Any) -> tuple[HttpEnvironment, Task]:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "a b", "bonus": 2}\n{"prompt": "text"}\n')
    environment = HttpEnvironment(url, str(path), wait_s=0, **options)
    return environment, Task(environment, environment.prompts[0])


@pytest.mark.feature("RL: a service behind HTTP rewards answers")
def test_a_service_rewards(url: str, tmp_path: Path) -> None:
    environment, task = asked(url, tmp_path)
    assert task.text == "a b"
    assert environment.prompts[1] == {"prompt": "text"}
    assert task.reward("12345") == 7.0
    Service.failures = [500, 429, 503]
    assert task.reward("1") == 3.0


def test_a_failing_service_is_reported(url: str, tmp_path: Path) -> None:
    _, task = asked(url, tmp_path, retries=1)
    Service.failures = [500, 502]
    with pytest.raises(RewardServiceError, match=r"failed after 2 requests with status 502"):
        task.reward("1")
    Service.failures = [404]
    with pytest.raises(RewardServiceError, match=r"failed after 1 requests with status 404"):
        task.reward("1")
    Service.body = b'{"score": 1}'
    with pytest.raises(RewardServiceError, match=r'which is not \{"reward": number\}'):
        task.reward("1")
    _, nobody = asked("http://127.0.0.1:9/", tmp_path, retries=0)
    with pytest.raises(RewardServiceError, match="has failed after 1 requests"):
        nobody.reward("1")


def test_a_wrong_line_of_prompts_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "good"}\n{\n{"question": "?"}\n')
    environment = HttpEnvironment("http://x", str(path))
    with pytest.raises(DataError, match=r"prompts.jsonl.*line 2"):
        environment.prompts[1]
    with pytest.raises(DataError, match="give a text, or an object whose entry prompt"):
        Task(environment, environment.prompts[2]).tokens(tokenizer(), None)


def tokenizer() -> MegatronTokenizer:
    return create_tokenizer(TokenizerSpec(tokenizer_type="NullTokenizer", vocab_size=10))


def test_a_prompt_of_messages_is_rendered_by_the_chat_template() -> None:
    source = (
        "{% for m in messages %}{{ '1 ' if m['role'] == 'user' else '2 ' }}{{ m['content'] }} "
        "{% endfor %}{% if add_generation_prompt %}2{% endif %}"
    )
    ids = tokenizer()
    chat = ChatTemplate(ids, source, {}, "--chat-template test")
    messages = [{"role": "user", "content": "5 6"}]
    task = Task(Numbers(), {"prompt": messages})
    assert task.tokens(ids, chat) == [1, 5, 6, 2]
    assert Task(Numbers(), "5 6").tokens(ids, chat) == [5, 6]
    with pytest.raises(DataError, match="there is no chat template: give --chat-template"):
        task.tokens(ids, None)
