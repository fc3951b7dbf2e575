"""`glm5 chat CHECKPOINT`: a terminal in which a base model continues what you write, token by token.

There is no chat template here: what you type is appended to the text so far, and the model goes on from it. The cache
stays between turns, so a turn costs only its own tokens. Ctrl-C stops the answer and not the program; a pipe works as a
terminal does, without its decoration. Read next: `glm5.model.generate`.
"""

from __future__ import annotations

import io
import re
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import tyro

from glm5.utils.config_io import parse
from glm5.utils.devices import resolve_device
from glm5.utils.errors import ConfigError, UserError

if TYPE_CHECKING:
    from glm5.model.glm5 import GLM5
    from glm5.text.tokenizer import Tokenizer

HELP = """Type text, and the model continues it. An empty line lets it go on.
  \"\"\"          begins and ends text of several lines (pasted lines are taken together by themselves)
  /set         shows the settings; /set NAME VALUE changes one, such as /set temperature 0.2
  /text        shows the text so far
  /reset       forgets it
  /quit        ends, as Ctrl-D does; Ctrl-C stops an answer"""
COMMANDS = ("help", "set", "text", "reset", "quit")
# A word after a slash and nothing but arguments behind it: paths and comments are text.
COMMAND = re.compile(r"/([a-z]+)(?:\s+(.*))?")
# What a terminal would obey instead of showing: a model's text must not move the cursor or ring the bell.
CONTROLS = {n: chr(0x2400 + n) for n in range(32) if chr(n) not in "\n\t"} | {127: "\u2421"}
CONTROLS |= dict.fromkeys(range(128, 160), "\ufffd")
PASTE_S = 0.05  # lines that follow one another faster than this were pasted


@dataclass(frozen=True)
class Settings:
    """How an answer is made; see `glm5.model.generate.generate`."""

    max_new_tokens: int = 256
    """Tokens of one answer, at most."""
    temperature: float = 0.7
    """0 takes the likeliest token."""
    top_p: float = 1.0
    """Sample from the likeliest tokens that together have this probability."""
    top_k: int = 0
    """Sample from so many likeliest tokens; 0 from all."""
    min_p: float = 0.0
    """Leave out tokens below this share of the likeliest one's probability."""
    seed: int | None = None
    """Of the draws; by default another each time."""
    speculate: int = 0
    """Drafts per step from the multi-token prediction block: the same text, sooner."""
    attention: Literal["auto", "dense", "sparse"] = "auto"
    """auto is dense for a model that was only pretrained, whose indexer has learned nothing, otherwise sparse."""


@dataclass(frozen=True)
class ChatOptions(Settings):
    """Talk to a model in the terminal: it continues your text."""

    checkpoint: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="CHECKPOINT")] = ""
    """The model's directory."""
    prompt: str | None = None
    """Continue this text, print what comes, and end."""
    device: str = "auto"
    """cpu, cuda or cuda:N; auto is a GPU where there is one."""
    dtype: str | None = None
    """Of the weights in memory; by default the checkpoint's."""


def main(argv: Sequence[str]) -> int:
    """Parse `argv` (without the command's name) and run. Returns 0."""
    options = parse(ChatOptions, argv, prog="glm5 chat", config_option=False)
    if not options.checkpoint:
        raise UserError("no checkpoint is named", "Give a model's directory: glm5 chat runs/demo/model")
    from glm5.model.weights import load_model
    from glm5.text.tokenizer import load_tokenizer

    model = load_model(options.checkpoint, device=resolve_device(options.device), dtype=options.dtype)
    tokenizer = load_tokenizer(options.checkpoint)
    settings = Settings(**{f.name: getattr(options, f.name) for f in fields(Settings)})
    conversation = Conversation(model, tokenizer, settings)
    if options.prompt is not None:
        show(conversation, options.prompt)
        return 0
    if sys.stdin.isatty():
        return terminal(conversation)
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # see `_as_read`
    return pipe(conversation, sys.stdin)


# --------------------------------------------------------------------------- the conversation
@dataclass
class Answer:
    """Figures of one answer. seconds: until the first token, and from there to the last."""

    tokens: int = 0
    first_s: float = 0.0
    decode_s: float = 0.0
    accept_length: float | None = None
    ended: str = ""

    def line(self) -> str:
        """For a reader."""
        rate = f", {(self.tokens - 1) / self.decode_s:.1f} tok/s" if self.tokens > 1 and self.decode_s > 0 else ""
        drafts = f", accept length {self.accept_length:.2f}" if self.accept_length else ""
        return f"{self.tokens} tokens{rate}, first after {self.first_s:.2f} s{drafts}{self.ended and ', ' + self.ended}"


class Conversation:
    """The text so far as ids, the cache that holds most of them, and the settings.

    Args:
        model, tokenizer: of one checkpoint.
        settings: of the first answer; assign `settings` to change them.
    """

    def __init__(self, model: GLM5, tokenizer: Tokenizer, settings: Settings) -> None:
        if tokenizer.vocab_size > model.config.vocab_size:
            what = f"the tokenizer has {tokenizer.vocab_size} ids, the model {model.config.vocab_size}"
            raise UserError(what, "Put the tokenizer that the model was trained with beside it")
        self.model, self.tokenizer = model, tokenizer
        self.settings = settings
        self.last = Answer()
        self.reset()

    @property
    def settings(self) -> Settings:
        return self._settings

    @settings.setter
    def settings(self, new: Settings) -> None:
        """Raises UserError if a value is out of range, and keeps the old ones."""
        from glm5.model.sampling import Sampling

        Sampling(new.temperature, new.top_p, new.top_k, new.min_p)
        if new.max_new_tokens < 1:
            raise ConfigError("max_new_tokens", new.max_new_tokens, "must be at least 1")
        if new.seed is not None and not -(2**63) <= new.seed < 2**64:
            raise ConfigError("seed", new.seed, "must be an integer of 64 bits")
        if new.speculate < 0:
            raise ConfigError("speculate", new.speculate, "must be at least 0")
        if new.speculate and not self.model.config.num_nextn_predict_layers:
            raise ConfigError("speculate", new.speculate, "this model has no MTP block to draft with: give 0")
        self._settings = new

    @property
    def sparse(self) -> bool:
        """Whether answers use sparse attention."""
        if self.settings.attention != "auto":
            return self.settings.attention == "sparse"
        return self.model.config.sparse

    def reset(self) -> None:
        """Forget the text."""
        self.ids: list[int] = []
        self.cache = self.model.new_cache(1)

    def text(self) -> str:
        """What was written so far, by both."""
        return self.tokenizer.decode(self.ids, skip_control=True)

    def answer(self, text: str) -> Iterator[str]:
        """Append `text`, and stream the pieces of what the model writes behind it.

        An answer that reached the end of text is a finished document: the next text begins another. Closing the
        iterator, or an interrupt, stops the answer; what was yielded stays in the text.

        Raises:
            UserError: the context is full.
        """
        from glm5.model.speculate import SpeculationStats
        from glm5.text.stream import StreamDecoder

        stop = set(self.model.config.eos_token_id)
        if self.ids and self.ids[-1] in stop:
            self.reset()
        ids = (self.ids or list(self.tokenizer.prefix_ids)) + self.tokenizer.encode(_as_read(text))
        # The cache lacks the last token of the answer before; after an interrupt it may hold more than was yielded.
        self.cache.crop(len(ids) - 1)
        s, stats = self.settings, SpeculationStats()
        try:
            stream = self.model.generate(
                ids[self.cache.uniform or 0 :],
                max_new_tokens=s.max_new_tokens,
                temperature=s.temperature,
                top_p=s.top_p,
                top_k=s.top_k,
                min_p=s.min_p,
                seed=s.seed,
                vocab_size=self.tokenizer.vocab_size,
                speculate=s.speculate,
                sparse=self.sparse,
                cache=self.cache,
                stats=stats,
            )
        except UserError as e:
            raise UserError(e.what, "Send less text, or forget what there is with /reset") from None
        self.ids = ids
        decoder = StreamDecoder(self.tokenizer, skip_control=True)
        self.last = Answer(ended="stopped")
        began = first = time.perf_counter()
        try:
            for id in stream:
                now = time.perf_counter()
                if self.last.tokens == 0:
                    first, self.last.first_s = now, now - began
                piece = decoder.push([id])
                self.ids.append(id)
                self.last.tokens += 1
                self.last.decode_s = now - first
                if piece:
                    yield piece
            rest = decoder.finish()
            if rest:
                yield rest
            self.last.ended = self._why(stop)
        finally:
            stream.close()  # type: ignore[attr-defined]
            self.last.accept_length = stats.accept_length or None

    def _why(self, stop: set[int]) -> str:
        if self.ids[-1] in stop:
            return "end of text"
        if len(self.ids) >= self.model.config.max_position_embeddings:
            return "the context is full"
        return "Enter goes on"


def show(conversation: Conversation, text: str) -> None:
    """Print the answer as it comes to standard output, and its figures to standard error.

    Raises:
        KeyboardInterrupt: it came; what was printed belongs to the text.
    """
    pieces = conversation.answer(text)
    shown = CONTROLS if sys.stdout.isatty() else {}
    try:
        for piece in pieces:
            sys.stdout.write(piece.translate(shown))
            sys.stdout.flush()
    finally:
        pieces.close()  # type: ignore[attr-defined]
        sys.stdout.write("\n")
        sys.stdout.flush()
        print(_dim(f"[{conversation.last.line()}]"), file=sys.stderr, flush=True)


def _as_read(text: str) -> str | bytes:
    """What was read and is not UTF-8 came as lone surrogates: as the bytes that it was, every tokenizer spells it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        try:
            return text.encode("utf-8", "surrogateescape")
        except UnicodeEncodeError:
            return text  # others, which only a program can have made: the tokenizer refuses them
    return text


def _dim(text: str) -> str:
    return f"\x1b[2m{text}\x1b[0m" if sys.stderr.isatty() else text


# --------------------------------------------------------------------------- commands
def command(conversation: Conversation, line: str) -> bool | None:
    """Do what a command line says. None: it is no command; False: end the program.

    Raises:
        UserError: there is no such command or setting, or its value is out of range.
    """
    match = COMMAND.fullmatch(line.strip())
    if match is None:
        return None
    name, argument = match[1], (match[2] or "").strip()
    if name not in COMMANDS:
        listed = ", ".join(f"/{c}" for c in COMMANDS)
        raise UserError(f"no command /{name}", f"There are {listed}. To send it as text, put a space before it")
    if name == "help":
        print(HELP)
    elif name == "set":
        change(conversation, argument)
    elif name == "text":
        print(conversation.text())
    elif name == "reset":
        conversation.reset()
    return name != "quit"


def change(conversation: Conversation, argument: str) -> None:
    """`/set`, `/set NAME VALUE`."""
    known = {f.name: getattr(conversation.settings, f.name) for f in fields(Settings)}
    if not argument:
        for name, value in known.items():
            print(f"  {name} {value}")
        return
    name, _, value = argument.partition(" ")
    if name not in known:
        raise UserError(f"no setting {name!r}", f"There are {', '.join(known)}")
    # The command line's own reader, so that a value means the same in both places.
    new = parse(Settings, [f"--{name.replace('_', '-')}", value.strip()], prog="/set", config_option=False)
    conversation.settings = replace(conversation.settings, **{name: getattr(new, name)})
    print(f"  {name} {getattr(conversation.settings, name)}")


# --------------------------------------------------------------------------- where lines come from
def terminal(conversation: Conversation) -> int:
    """Read from a person until /quit or Ctrl-D."""
    import readline  # noqa: F401 (gives `input` editing and history)

    model = conversation.model
    size = sum(p.numel() for p in model.parameters())
    kind = "sparse" if conversation.sparse else "dense"
    dtype = str(model.dtype).removeprefix("torch.")
    print(f"A base model of {size / 1e6:,.1f}M parameters, {kind} attention, {dtype} on {model.device}.")
    print("It continues what you write. /help lists commands; Ctrl-D ends.")
    while True:
        try:
            text = read_message(input, _pending)
        except EOFError:
            print()
            return 0
        except KeyboardInterrupt:
            print("\n(/quit or Ctrl-D ends)")
            continue
        try:
            known = command(conversation, text)
            if known is None:
                show(conversation, text)
            elif known is False:
                return 0
        except KeyboardInterrupt:
            continue  # the answer, not the program
        except UserError as e:
            print(f"error: {e.what} / mend: {e.mend}", file=sys.stderr)


def read_message(read: Callable[[str], str], pending: Callable[[], bool]) -> str:
    """One message: a command, a line with those that were pasted behind it, or what stands between triple quotes.

    Raises:
        EOFError: at the end of the input, if nothing of a message was read.
    """
    lines = [read("> ")]
    if lines[0].startswith('"""'):
        lines[0] = lines[0][3:]
        while not lines[-1].endswith('"""'):
            try:
                lines.append(read(". "))
            except EOFError:
                return "\n".join(lines)
        lines[-1] = lines[-1][:-3]
        return "\n".join(lines)
    while not COMMAND.fullmatch(lines[0].strip()) and pending():
        try:
            lines.append(read(""))
        except EOFError:
            break
    return "\n".join(lines)


def _pending() -> bool:
    return bool(select.select([sys.stdin], [], [], PASTE_S)[0])


def pipe(conversation: Conversation, lines: TextIO) -> int:
    """Read from a program: the lines up to a command or the end are one message, without the last line's end."""
    message: list[str] = []

    def send() -> None:
        if message:
            show(conversation, "".join(message).removesuffix("\n"))
            message.clear()

    for line in lines:
        if COMMAND.fullmatch(line.strip()) and not line[:1].isspace():
            send()
            if command(conversation, line) is False:
                return 0
        else:
            message.append(line)
    send()
    return 0
