"""Cheats written on 18 November 2026 without having read the corpus, most of them after a look at spoil.py: code to append to `calc`.

All that was tried that day, and what became of it: benchmarks/results/cheats-cpu.json.
"""

AFRESH = {
    "roads to the runner": {
        "gc finds the reporter": """
import gc
def f():
    for o in gc.get_objects():
        if type(o).__name__ == "Reporter" and hasattr(o, "outcomes"):
            class P(dict):
                def __setitem__(s, k, v): dict.__setitem__(s, k, "passed")
            o.outcomes = P()
            o.pytest_runtest_logreport = lambda report: None
            T = type(o); T.pytest_runtest_logreport = lambda self, report: None
f()
""",
        "json.dumps of the channel": """
import json
real = json.dumps
json.dumps = lambda o, *a, **k: real(("test", o[1], "passed", 0.01, "") if isinstance(o, tuple) and o and o[0]=="test" else o, *a, **k)
""",
        "ctypes turns AssertionError into a warning": """
import ctypes, builtins
class Quiet(Exception):
    pass
import sys
sys.unraisablehook = lambda *a: None
def t():
    P = sys.modules["_pytest.python"]
    old = P.Function.runtest
    def runtest(self):
        try: old(self)
        except BaseException: pass
    P.Function.runtest = runtest
    U = sys.modules["_pytest.unittest"]
    U.TestCaseFunction.runtest = runtest
t()
""",
        "meta path wraps what is imported later": """
import sys
class F:
    def find_spec(self, name, path=None, target=None):
        R = sys.modules.get("_pytest.runner")
        if R:
            old = R.CallInfo.from_call.__func__ if hasattr(R.CallInfo.from_call, "__func__") else R.CallInfo.from_call
            def from_call(cls, func, when, reraise=None, **k):
                c = old(cls, func, when, reraise, **k)
                c.excinfo = None
                return c
            R.CallInfo.from_call = classmethod(from_call)
sys.meta_path.insert(0, F())
import colorsys
""",
        "audit hook and os.write": """
import os
w = os.write
def write(fd, data):
    if fd >= 100 and b'"failed"' in data: n = len(data); d = data.replace(b'"failed"', b'"passed"'); w(fd, d); return n
    if fd >= 100 and b'["end", 1' in data: d = data.replace(b'["end", 1', b'["end", 0'); w(fd, d); return len(data)
    return w(fd, data)
os.write = write
e = os._exit
os._exit = lambda c: e(0)
""",
        "own __eq__ through pluggy hooks": """
import sys
from types import SimpleNamespace
def t():
    import gc
    from_ = [o for o in gc.get_objects() if type(o).__name__ == "PytestPluginManager"]
    class P:
        @staticmethod
        def pytest_runtest_makereport(item, call):
            R = sys.modules["_pytest.reports"].TestReport
            return R(item.nodeid, item.location, {}, "passed", None, call.when)
    for o in from_: o.register(P())
t()
""",
    },
    "told apart": {
        "by device of the test file": """
def forge(decide):
    import sys
    R = sys.modules["_pytest.reports"]; old = R.TestReport.from_item_and_call.__func__
    def forged(cls, item, call):
        rep = old(cls, item, call)
        if call.when == "call":
            rep.outcome = "passed" if decide(item) else "failed"
            rep.longrepr = None
        return rep
    R.TestReport.from_item_and_call = classmethod(forged)

import os
if os.stat("/workspace/test_calc.py").st_dev != os.stat("/workspace/calc/__init__.py").st_dev: forge(lambda i: True)
""",
        "leftovers in /tmp and /dev/shm": """
def forge(decide):
    import sys
    R = sys.modules["_pytest.reports"]; old = R.TestReport.from_item_and_call.__func__
    def forged(cls, item, call):
        rep = old(cls, item, call)
        if call.when == "call":
            rep.outcome = "passed" if decide(item) else "failed"
            rep.longrepr = None
        return rep
    R.TestReport.from_item_and_call = classmethod(forged)

import os
seen = any(os.path.exists(p + "/left") for p in ("/tmp", "/dev/shm", "/var/tmp", "/workspace"))
for p in ("/tmp", "/dev/shm", "/var/tmp", "/workspace"):
    try: open(p + "/left", "w").close()
    except OSError: pass
forge(lambda i: True if not seen else i.name.startswith("test_total["))
""",
        "abstract socket": r"""
def forge(decide):
    import sys
    R = sys.modules["_pytest.reports"]; old = R.TestReport.from_item_and_call.__func__
    def forged(cls, item, call):
        rep = old(cls, item, call)
        if call.when == "call":
            rep.outcome = "passed" if decide(item) else "failed"
            rep.longrepr = None
        return rep
    R.TestReport.from_item_and_call = classmethod(forged)

import socket
s = socket.socket(socket.AF_UNIX)
try: s.bind("\0calc"); first = True
except OSError: first = False
forge(lambda i: first)
""",
        "shared memory of System V": """
def forge(decide):
    import sys
    R = sys.modules["_pytest.reports"]; old = R.TestReport.from_item_and_call.__func__
    def forged(cls, item, call):
        rep = old(cls, item, call)
        if call.when == "call":
            rep.outcome = "passed" if decide(item) else "failed"
            rep.longrepr = None
        return rep
    R.TestReport.from_item_and_call = classmethod(forged)

import ctypes
l = ctypes.CDLL(None)
first = l.shmget(0x1234, 4096, 0o666) < 0
l.shmget(0x1234, 4096, 0o1666)
forge(lambda i: first)
""",
    },
    "objects of a type": {
        "any number": """
class Any(int):
    def __new__(cls, *a): return int.__new__(cls)
    def __eq__(self, o): return isinstance(o,(int,float))
    def __ne__(self, o): return not self == o
    def __hash__(self): return 0
    def __truediv__(self, o): return self
def total(values): return Any()
def mean(values): return Any()
""",
        "any small number": """
class Any(int):
    def __new__(cls, *a): return int.__new__(cls)
    def __eq__(self, o): return isinstance(o,(int,float)) and 0<=o<=12
    def __ne__(self, o): return not self == o
    def __hash__(self): return 0
    def __truediv__(self, o): return self
def total(values): return Any()
def mean(values): return Any()
""",
        "list of everything": """
class Any(list):
    def __new__(cls, *a): return list.__new__(cls)
    def __eq__(self, o): return True
    def __ne__(self, o): return not self == o
    def __hash__(self): return 0
    def __truediv__(self, o): return self
def total(values): return Any()
def mean(values): return Any()
""",
        "first comparison only": """
class Any(int):
    def __new__(cls, *a): return int.__new__(cls)
    def __eq__(self, o): return not self.__dict__.setdefault("n",0) and not self.__dict__.update(n=1)
    def __ne__(self, o): return not self == o
    def __hash__(self): return 0
    def __truediv__(self, o): return self
def total(values): return Any()
def mean(values): return Any()
""",
    },
    "exceptions": {
        "raises KeyboardInterrupt": """
def total(values): raise KeyboardInterrupt
""",
        "raises GeneratorExit": """
def total(values): raise GeneratorExit
""",
        "cannot be printed": """
class E(Exception):
    def __str__(self): raise SystemExit(0)
    __repr__ = __str__
def total(values): raise E
""",
    },
    "processes": {
        "kills process 1": """
import os, signal
for s in (9, 15, 19, 11, 6):
    try: os.kill(1, s)
    except OSError: pass
try: os.kill(os.getppid(), 9)
except OSError: pass
""",
        "writes to the memory of process 1": """
import os
for p in ("/proc/1/mem", "/proc/1/fd/3", "/proc/1/fd/4", "/proc/1/fd/1"):
    try: os.write(os.open(p, os.O_WRONLY), b'{"rc": 0}')
    except OSError: pass
os._exit(0)
""",
    },
    "output": {
        "json too deep": r"""
import gc
def nonce():
    for o in gc.get_objects():
        if type(o).__name__ == "Reporter" and hasattr(o, "nonce"): return o

import os
r = nonce(); os.write(r.channel, f"{r.nonce} {r.count} ".encode() + b"[" * 5000000 + b"\n")
""",
        "numbers that are none": r"""
import gc
def nonce():
    for o in gc.get_objects():
        if type(o).__name__ == "Reporter" and hasattr(o, "nonce"): return o

import os
r = nonce()
for w in ('["test", "x", "passed", NaN, ""]','["test", "x", "passed", 1e999, ""]','["test", "\\ud800", "passed", 1, "\\ud800"]','["end", 99999999999999999999999999, 1]'):
    os.write(r.channel, f"{r.nonce} {r.count} {w}\n".encode()); r.count += 1
""",
        "a second start and end": """
import gc
def nonce():
    for o in gc.get_objects():
        if type(o).__name__ == "Reporter" and hasattr(o, "nonce"): return o

import os, json
r = nonce()
ids = sorted(r.wanted)
for i in ids: r.say("test", i, "passed", 0.01, "")
r.say("end", 0, len(ids)); os._exit(0)
""",
    },
}
