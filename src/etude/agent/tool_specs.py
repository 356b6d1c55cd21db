"""What tools there are, what a policy is told of them, what may be set, and whether a call fits.

Few tools, few required arguments, relative paths, lines counted from 1: what small models learn most easily. There is no tool to end
an episode: a turn without calls does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from etude.agent.calls import Parameter, ToolSpec

if TYPE_CHECKING:
    from etude.agent.calls import Call

ToolName = Literal["read", "grep", "glob", "list", "search", "edit", "write", "shell", "todo", "bash"]
READ_ONLY = frozenset({"read", "grep", "glob", "list", "search"})
BASH_ONLY: list[ToolName] = ["bash"]  # as mini-swe-agent has it


class ToolSettings(BaseModel):
    """The tools of one environment."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tools: list[ToolName] = Field(
        default=["read", "grep", "glob", "list", "search", "edit", "write", "shell", "todo"],
        min_length=1,
        description="tools offered; ['bash'] alone to compare with mini-swe-agent",
    )
    strict_arguments: bool = Field(
        default=False,
        description="refuse arguments that are unknown or of another type, instead of passing over or converting them",
    )
    output_characters: int = Field(
        default=10_000, ge=1000, le=30_000, description="most characters of an answer; the middle is cut"
    )
    read_lines: int = Field(default=400, ge=10, description="most lines of one read")
    matches: int = Field(
        default=100, ge=1, description="most matches of one grep, and entries of one glob or list, times five"
    )
    seconds: float = Field(default=20.0, gt=0, description="most seconds of a tool other than shell")
    shell_seconds: int = Field(default=60, ge=1, description="seconds of a command that names no timeout")
    shell_most_seconds: int = Field(default=600, ge=1, description="most seconds of a command, whatever it names")
    shell: str = Field(default="bash", description="the shell inside the sandbox: bash, or sh where there is no bash")


def _spec(name: str, about: str, *parameters: Parameter) -> ToolSpec:
    return ToolSpec(name, about, parameters)


def _may(name: str, kind: type[str | int], about: str) -> Parameter:
    return Parameter(name, kind, about, required=False)


_PATH = Parameter("path", str, "file, relative to the workspace")
_COMMAND = (
    Parameter("command", str, "what to run in the workspace; each command starts afresh"),
    _may("timeout", int, "seconds"),
)
SPECS = {
    spec.name: spec
    for spec in (
        _spec(
            "read",
            "Show a file with line numbers.",
            _PATH,
            _may("start", int, "first line, from 1"),
            _may("end", int, "last line"),
        ),
        _spec(
            "grep",
            "Find lines by a regular expression; answers path:line:text.",
            Parameter("pattern", str, "Python regular expression, matched line by line"),
            _may("path", str, "file or folder to look in"),
            _may("glob", str, "only files whose path fits, such as *.py"),
            _may("max", int, "most matches to show"),
        ),
        _spec(
            "glob", "Find files by name.", Parameter("pattern", str, "such as *.py (in any folder) or src/**/test_*.py")
        ),
        _spec("list", "List a folder.", _may("path", str, "folder; the workspace if not given")),
        _spec(
            "search",
            "Find code by meaning.",
            Parameter("query", str, "what the code does, in plain words"),
            _may("k", int, "how many results"),
        ),
        _spec(
            "edit",
            "Replace one piece of a file. old must be in it exactly once, spaces included.",
            _PATH,
            Parameter("old", str, "text to replace"),
            Parameter("new", str, "text to put there"),
        ),
        _spec("write", "Write a whole file.", _PATH, Parameter("content", str, "all of its text")),
        _spec("shell", "Run a command.", *_COMMAND),
        _spec("todo", "Keep the plan: replaces it.", Parameter("items", str, "one a line: [ ] open or [x] done")),
        _spec("bash", "Run a command.", *_COMMAND),
    )
}


class BadCall(Exception):  # noqa: N818 - an answer
    """A call that does not fit its tool: the short fixed answer, and which kind of fault it is."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


def checked(call: Call, settings: ToolSettings) -> tuple[dict[str, Any], list[str]]:
    """Return a call's arguments as its tool takes them, and the names of those passed over; BadCall if it does not fit."""
    if call.name not in settings.tools:
        raise BadCall("unknown tool", f"Unknown tool. Tools: {', '.join(settings.tools)}.")
    known = {parameter.name: parameter for parameter in SPECS[call.name].parameters}
    unknown = [name for name in call.arguments if name not in known]
    if unknown and settings.strict_arguments:
        names = ", ".join(name if parameter.required else f"{name}?" for name, parameter in known.items())
        raise BadCall("unknown argument", f"{call.name}: unknown argument. Arguments: {names}.")
    given = {name: value for name, value in call.arguments.items() if name in known}
    if not settings.strict_arguments:
        given = {name: value for name, value in given.items() if value is not None}
    for name, parameter in known.items():
        if parameter.required and name not in given:
            raise BadCall("missing argument", f"{call.name}: argument {name} is missing.")
    return {name: _value(call.name, known[name], value, settings) for name, value in given.items()}, unknown


def _value(tool: str, parameter: Parameter, value: Any, settings: ToolSettings) -> str | int:
    """Return an argument in its type. Decimal digits are a number in any environment: raw-text formats have nothing else."""
    lenient = not settings.strict_arguments
    if parameter.kind is int:
        if isinstance(value, int) and not isinstance(value, bool):
            number = value
        elif (isinstance(value, str) and value.strip().isdecimal() and len(value) < 10) or (
            lenient and isinstance(value, float) and value.is_integer()
        ):
            number = int(value)
        else:
            raise BadCall("mistyped argument", f"{tool}: argument {parameter.name} must be a whole number.")
        if not 0 < number < 1 << 31:
            raise BadCall("bad value", f"{tool}: argument {parameter.name} must be 1 or more.")
        return number
    if isinstance(value, str):
        return value
    if lenient and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if lenient and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    raise BadCall("mistyped argument", f"{tool}: argument {parameter.name} must be text.")
