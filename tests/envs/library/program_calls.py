"""A program and tests of it that use what it defines in all the ways of Python; each holds within one process."""

__all__ = ["MORE_TESTS", "OTHER_PROGRAM", "PROGRAM", "TESTS"]

PROGRAM = '''
import asyncio, collections, contextlib, dataclasses, enum, functools, sys, abc, typing, threading
class Solution:
    def inorder(self, root: Optional[TreeNode]) -> List[int]:
        return self.inorder(root.left) + [root.val] + self.inorder(root.right) if root else []
    def reverse(self, head: Optional[ListNode]) -> Optional[ListNode]:
        last = None
        while head: head.next, last, head = last, head, head.next
        return last
    def build(self, values):
        first = ListNode(0); at = first
        for v in values: at.next = ListNode(v); at = at.next
        return first.next
class MyError(Exception): pass
class CodeError(MyError):
    def __init__(self, code, what="x"):
        super().__init__(f"{what} {code}"); self.code = code
    def __str__(self): return f"code {self.code}"
def fails(code=3): raise CodeError(code)
def bad(x): raise ValueError(f"bad {x}")
def missing(d): return d["nothing"]
def chained():
    try: {}[1]
    except KeyError as e: raise MyError("no") from e
Pair = collections.namedtuple("Pair", "left right")
class Point(typing.NamedTuple):
    x: int
    y: int = 0
    def norm(self): return abs(self.x) + abs(self.y)
def pair(): return Pair(1, [2])
def point(): return Point(3, 4)
@dataclasses.dataclass
class Item:
    name: str
    price: float = 1.5
    def total(self, n): return n * self.price
@dataclasses.dataclass(frozen=True, order=True)
class Frozen:
    a: int
def item(): return Item("a", 2.0)
def items(): return [Item("a"), Item("b")]
def hello(name="you"): print("hello", name); print("err", file=sys.stderr)
def add_io(): return int(input("a? ")) + int(input())
def read_all(): return [line.strip() for line in sys.stdin]
@contextlib.contextmanager
def opened(x):
    log.append("in")
    try: yield [x]
    finally: log.append("out")
log = []
class Timer:
    def __enter__(self): self.on = True; return self
    def __exit__(self, kind, error, trace):
        self.on = False; self.kind = kind.__name__ if kind else None
        return kind is ValueError
async def f(x):
    await asyncio.sleep(0); return x + 1
async def afails(): raise MyError("async")
async def numbers(n):
    for i in range(n): yield i
class ACtx:
    async def __aenter__(self): return 5
    async def __aexit__(self, *e): return False
async def chan(q, n):
    for i in range(n): await q.put(i)
    await q.put(None)
async def drain(q):
    out = []
    while (x := await q.get()) is not None: out.append(x)
    return out
def queue(): return asyncio.Queue(1)
class Color(enum.Enum):
    RED = 1
    BLUE = 2
class Level(enum.IntEnum):
    LOW = 1
    HIGH = 2
def level(): return Level.HIGH
def color(): return Color.RED
class Vector:
    def __init__(self, x, y): self.x, self.y = x, y
    def __mul__(self, k):
        return Vector(self.x * k, self.y * k) if isinstance(k, (int, float)) else self.x * k.x + self.y * k.y
    __rmul__ = __mul__
    def __add__(self, o): return Vector(self.x + o.x, self.y + o.y)
    def __iadd__(self, o): self.x += o.x; self.y += o.y; return self
    def __eq__(self, o): return (self.x, self.y) == ((o.x, o.y) if isinstance(o, Vector) else tuple(o))
    def __hash__(self): return hash((self.x, self.y))
    def __lt__(self, o): return abs(self) < abs(o)
    def __abs__(self): return (self.x ** 2 + self.y ** 2) ** 0.5
    def __repr__(self): return f"Vector({self.x}, {self.y})"
    def __getitem__(self, i): return (self.x, self.y)[i]
    def __neg__(self): return Vector(-self.x, -self.y)
    def __bool__(self): return bool(self.x or self.y)
    def __float__(self): return float(abs(self))
    @property
    def size(self): return 2
    @classmethod
    def zero(cls): return cls(0, 0)
    @staticmethod
    def unit(): return "m"
class Trie:
    """A trie."""
    count = 0
    def __init__(self): self.words = set(); Trie.count += 1
    def insert(self, w): self.words.add(w); return self
    def __contains__(self, w): return w in self.words
    def __len__(self): return len(self.words)
class Single:
    _one = None
    def __new__(cls):
        if cls._one is None: cls._one = super().__new__(cls)
        return cls._one
class Node:
    def __init__(self, v): self.v, self.next = v, None
def link(a, b): a.next = b; return a
class Stack(list):
    def push(self, x): self.append(x)
    def peek(self): return self[-1]
class Animal(abc.ABC):
    @abc.abstractmethod
    def speak(self): ...
class Dog(Animal):
    def speak(self): return "woof"
def counts(s): return collections.Counter(s)
def dd(): d = collections.defaultdict(int); d["a"] += 1; return d
def od(): return collections.OrderedDict(b=1, a=2)
def twice(g, x): return g(g(x))
def inc(x): return x + 1
def same(x): return x
def sort_kw(*, nums): nums.sort()
def rotate(m):
    for row in m: row.reverse()
def gen(n): yield from range(n)
class Countdown:
    def __init__(self, n): self.n = n
    def __iter__(self): return self
    def __next__(self):
        if self.n <= 0: raise StopIteration
        self.n -= 1; return self.n + 1
def deco(fn):
    @functools.wraps(fn)
    def inner(*a): inner.calls += 1; return fn(*a)
    inner.calls = 0
    return inner
def area(shape): return shape.w * shape.h
def notify(sink, x): sink.send(x); return sink
def read_file(fh): return [line.strip() for line in fh]
def total(it): return sum(it)
class Account:
    def __init__(self): self.balance = 0; self._lock = threading.Lock()
    def deposit(self, n):
        if n <= 0: raise ValueError("Deposit must be positive")
        with self._lock: self.balance += n
def make_adder(n): return lambda x: x + n
def quit_(n): sys.exit(n)
def typed(t, x): return t(x)
cache = {}
@functools.lru_cache
def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)
def documented(a, b=2):
    """Doc of it."""
'''

TESTS = [
    "root = TreeNode(2, TreeNode(1), TreeNode(3))\nassert Solution().inorder(root) == [1, 2, 3]",
    "h = Solution().reverse(Solution().build([1, 2]))\nassert h.val == 2 and h.next.val == 1 and h.next.next is None",
    (
        "class ListNode:\n"
        "    def __init__(self, val=0, next=None): self.val, self.next = val, next\n"
        "h = Solution().reverse(ListNode(1, ListNode(2)))\n"
        "assert h.val == 2 and h.next.val == 1 and h.next.next is None"
    ),
    "try: fails()\nexcept MyError: pass\nelse: assert False",
    (
        "try: fails(7)\n"
        "except CodeError as e: assert e.code == 7 and str(e) == 'code 7' and isinstance(e, MyError)\n"
        "else: assert False"
    ),
    "try: bad(2)\nexcept ValueError as e: assert str(e) == 'bad 2' and e.args == ('bad 2',)\nelse: assert False",
    "try: missing({})\nexcept KeyError as e: assert e.args[0] == 'nothing'",
    "try: chained()\nexcept MyError as e: assert isinstance(e.__cause__, KeyError)",
    "assert issubclass(CodeError, MyError) and issubclass(MyError, Exception)",
    "try: raise CodeError(4)\nexcept MyError as e: assert e.code == 4",
    (
        "import unittest\n"
        "class T(unittest.TestCase):\n"
        "    def test(self):\n"
        "        with self.assertRaises(MyError): fails()\n"
        "        with self.assertRaisesRegex(ValueError, 'bad 3'): bad(3)\n"
        "        self.assertRaises(CodeError, fails)"
    ),
    (
        "p = pair()\n"
        "assert p.left == 1 and p.right == [2] and p == (1, [2]) and p._fields == ('left', 'right') and "
        "p._asdict()['left'] == 1"
    ),
    (
        "p = point()\n"
        "assert p.x == 3 and p.norm() == 7 and isinstance(p, Point) and isinstance(p, tuple) and p == "
        "Point(3, 4) and repr(p) == 'Point(x=3, y=4)'"
    ),
    "assert Point(1).y == 0 and Point(1)._replace(y=5).y == 5",
    (
        "i = item()\n"
        "assert i.name == 'a' and i.total(2) == 4.0 and i == Item('a', 2.0) and repr(i) == "
        "\"Item(name='a', price=2.0)\""
    ),
    (
        "import dataclasses as d\n"
        "assert d.asdict(item()) == {'name': 'a', 'price': 2.0} and d.astuple(item()) == ('a', 2.0) and "
        "d.is_dataclass(item()) and [f.name for f in d.fields(item())] == ['name', 'price']"
    ),
    "from dataclasses import replace\nassert replace(item(), price=3).price == 3",
    "assert [x.name for x in items()] == ['a', 'b'] and max(items(), key=lambda x: x.name).name == 'b'",
    "assert Frozen(1) < Frozen(2) and sorted([Frozen(2), Frozen(1)])[0].a == 1 and len({Frozen(1), Frozen(1)}) == 1",
    (
        "from dataclasses import FrozenInstanceError\n"
        "try: Frozen(1).a = 2\n"
        "except FrozenInstanceError: pass\n"
        "else: assert False"
    ),
    (
        "import io\n"
        "from contextlib import redirect_stdout\n"
        "s = io.StringIO()\n"
        "with redirect_stdout(s): hello('me')\n"
        "assert s.getvalue() == 'hello me\\n'"
    ),
    (
        "import io, contextlib\n"
        "s = io.StringIO()\n"
        "with contextlib.redirect_stderr(s): hello()\n"
        "assert s.getvalue() == 'err\\n'"
    ),
    (
        "import io, sys\n"
        "old, sys.stdout = sys.stdout, io.StringIO()\n"
        "hello()\n"
        "out, sys.stdout = sys.stdout.getvalue(), old\n"
        "assert out == 'hello you\\n'"
    ),
    (
        "from unittest.mock import patch\n"
        "import io\n"
        "with patch('sys.stdout', new_callable=io.StringIO) as out:\n"
        "    hello()\n"
        "assert out.getvalue() == 'hello you\\n'"
    ),
    (
        "from unittest.mock import patch\n"
        "with patch('builtins.input', side_effect=['1', '2']):\n"
        "    assert add_io() == 3"
    ),
    "import sys, io\nsys.stdin = io.StringIO('4\\n5\\n')\nassert add_io() == 9",
    "import sys, io\nsys.stdin = io.StringIO('a\\nb\\n')\nassert read_all() == ['a', 'b']",
    "with opened(3) as x:\n    assert x == [3]\nassert list(log)[-2:] == ['in', 'out']",
    "with Timer() as t:\n    assert t.on\nassert not t.on and t.kind is None",
    "t = Timer()\nwith t:\n    raise ValueError\nassert t.kind == 'ValueError'",
    "import contextlib\nwith contextlib.ExitStack() as s:\n    assert s.enter_context(opened(1)) == [1]",
    "import asyncio\nassert asyncio.run(f(1)) == 2",
    "import asyncio\nasync def main(): return await f(1) + await f(2)\nassert asyncio.run(main()) == 5",
    "import asyncio\nasync def main(): return await asyncio.gather(f(1), f(2))\nassert asyncio.run(main()) == [2, 3]",
    "import asyncio\ntry: asyncio.run(afails())\nexcept MyError as e: assert str(e) == 'async'\nelse: assert False",
    "import asyncio\nasync def main(): return [x async for x in numbers(3)]\nassert asyncio.run(main()) == [0, 1, 2]",
    "import asyncio\nasync def main():\n    async with ACtx() as x: return x\nassert asyncio.run(main()) == 5",
    (
        "import asyncio\n"
        "async def main():\n"
        "    q = queue()\n"
        "    return (await asyncio.gather(chan(q, 3), drain(q)))[1]\n"
        "assert asyncio.run(main()) == [0, 1, 2]"
    ),
    "import asyncio\nassert asyncio.run(asyncio.wait_for(f(1), 5)) == 2",
    "async def test_f():\n    assert await f(1) == 2",
    (
        "import unittest\n"
        "class T(unittest.IsolatedAsyncioTestCase):\n"
        "    async def test(self):\n"
        "        self.assertEqual(await f(1), 2)"
    ),
    "import asyncio\nloop = asyncio.new_event_loop()\nassert loop.run_until_complete(f(1)) == 2",
    "import asyncio, inspect\nassert asyncio.iscoroutine(f(1))",
    (
        "assert color() is Color.RED and color() == Color.RED and color().name == 'RED' and "
        "Color(2).name == 'BLUE' and Color['RED'].value == 1 and len(Color) == 2 and [c.name for c in "
        "Color] == ['RED', 'BLUE'] and Color.RED in Color and Color.RED != Color.BLUE"
    ),
    (
        "assert level() == 2 and level() is Level.HIGH and level().name == 'HIGH' and level() > "
        "Level.LOW and isinstance(level(), int)"
    ),
    (
        "v = Vector(1, 2)\n"
        "assert v * 3 == Vector(3, 6) and 3 * v == Vector(3, 6) and v * v == 5 and v + v == Vector(2, "
        "4) and -v == Vector(-1, -2)"
    ),
    "v = Vector(1, 2)\nw = v\nv += Vector(1, 1)\nassert w.x == 2 and v is w",
    (
        "assert Vector(1, 2) == (1, 2) and Vector(1, 2) != Vector(1, 3) and Vector(1, 1) < Vector(2, 2) "
        "and Vector(3, 4)[1] == 4 and abs(Vector(3, 4)) == 5 and float(Vector(3, 4)) == 5.0"
    ),
    (
        "assert len({Vector(1, 2), Vector(1, 2)}) == 1 and {Vector(1, 2): 3}[Vector(1, 2)] == 3 and not "
        "Vector(0, 0) and sorted([Vector(2, 2), Vector(1, 1)])[0].x == 1"
    ),
    (
        "assert str(Vector(1, 2)) == 'Vector(1, 2)' and f'{Vector(1, 2)}' == 'Vector(1, 2)' and "
        "Vector(1, 2).size == 2 and Vector.zero().x == 0 and Vector.unit() == 'm' and Vector.zero() == "
        "Vector(0, 0)"
    ),
    "a, b = Vector(1, 2)\nassert (a, b) == (1, 2)",
    (
        "t = Trie()\n"
        "t.insert('a').insert('b')\n"
        "assert 'a' in t and 'z' not in t and len(t) == 2 and t.__doc__ == 'A trie.' and Trie.count >= 1"
    ),
    "assert Single() is Single()",
    "a, b = Node(1), Node(2)\nassert link(a, b) is a and a.next is b and a.next.v == 2",
    (
        "assert type(Node(1)).__name__ == 'Node' and Node(1).__class__.__name__ == 'Node' and "
        "type(Node(1)) is Node and isinstance(Node(1), Node) and not isinstance(3, Node) and "
        "hasattr(Node(1), 'v') and not hasattr(Node(1), 'w')"
    ),
    (
        "s = Stack()\n"
        "s.push(1)\n"
        "s.append(2)\n"
        "assert s.peek() == 2 and len(s) == 2 and s == [1, 2] and s[0] == 1 and 2 in s and list(s) == [1, 2]"
    ),
    "try: Animal()\nexcept TypeError: pass\nelse: assert False",
    "assert isinstance(Dog(), Animal) and issubclass(Dog, Animal) and Dog().speak() == 'woof'",
    "assert counts('aab').most_common(1) == [('a', 2)] and counts('aab') == {'a': 2, 'b': 1} and counts('')['x'] == 0",
    "d = dd()\nassert d['a'] == 1 and d['zz'] == 0",
    "assert list(od()) == ['b', 'a'] and od() == {'a': 2, 'b': 1} and od().popitem() == ('a', 2)",
    "assert twice(lambda x: inc(x) * 2, 1) == 10 and twice(inc, 1) == 3",
    "a = [2, 1]\nsort_kw(nums=a)\nassert a == [1, 2]",
    "m = [[1, 2], [3, 4]]\nrow = m[0]\nrotate(m)\nassert m == [[2, 1], [4, 3]] and row == [2, 1]",
    "a = [1]\nassert same(a) is a and same((a,))[0] == [1]",
    "assert list(gen(3)) == [0, 1, 2] and sum(gen(4)) == 6 and next(gen(1)) == 0 and not gen(1) == [0]",
    (
        "import types, collections.abc\n"
        "assert isinstance(gen(1), types.GeneratorType) and isinstance(gen(1), "
        "collections.abc.Iterator) and type(gen(1)).__name__ == 'generator'"
    ),
    "g = gen(1)\nnext(g)\ntry: next(g)\nexcept StopIteration: pass\nelse: assert False",
    "assert list(Countdown(3)) == [3, 2, 1] and [x for x in Countdown(2)] == [2, 1]",
    "@deco\ndef one(x): return x\nassert one(1) == 1 and one(2) == 2 and one.calls == 2",
    "h = deco(inc)\nassert h(1) == 2 and h.calls == 1 and h.__name__ == 'inc'",
    "class S:\n    def __init__(self): self.w, self.h = 2, 3\nassert area(S()) == 6",
    "from collections import namedtuple\nS = namedtuple('S', 'w h')\nassert area(S(2, 3)) == 6",
    "from dataclasses import dataclass\n@dataclass\nclass S:\n    w: int\n    h: int\nassert area(S(2, 3)) == 6",
    "from unittest.mock import Mock\nm = Mock()\nassert notify(m, 3) is m\nm.send.assert_called_once_with(3)",
    "from types import SimpleNamespace as N\nassert area(N(w=2, h=3)) == 6",
    "import io\nassert read_file(io.StringIO('a\\nb\\n')) == ['a', 'b']",
    "assert total(x for x in [1, 2]) == 3 and total(iter([1])) == 1 and total(map(int, '12')) == 3",
    (
        "a = Account()\n"
        "a.deposit(5)\n"
        "assert a.balance == 5\n"
        "import threading\n"
        "ts = [threading.Thread(target=a.deposit, args=(1,)) for _ in range(10)]\n"
        "[t.start() for t in ts]\n"
        "[t.join() for t in ts]\n"
        "assert a.balance == 15"
    ),
    "a = Account()\ntry: a.deposit(-1)\nexcept ValueError as e: assert 'positive' in str(e)\nelse: assert False",
    (
        "from concurrent.futures import ThreadPoolExecutor as P\n"
        "with P(3) as p: assert list(p.map(inc, [1, 2, 3])) == [2, 3, 4]"
    ),
    "assert make_adder(2)(3) == 5",
    (
        "import unittest\n"
        "class T(unittest.TestCase):\n"
        "    def test(self):\n"
        "        with self.assertRaises(SystemExit) as c: quit_(3)\n"
        "        self.assertEqual(c.exception.code, 3)"
    ),
    "try: quit_(2)\nexcept SystemExit as e: assert e.code == 2\nelse: assert False",
    "assert typed(int, '3') == 3 and typed(list, 'ab') == ['a', 'b'] and typed(str, 5) == '5'",
    "assert fib(10) == 55 and fib.cache_info().hits > 0",
    "assert documented.__name__ == 'documented' and documented.__doc__ == 'Doc of it.' and callable(documented)",
    "import copy\na = Item('a')\nb = copy.deepcopy(a)\nb.name = 'c'\nassert a.name == 'a' and b == Item('c')",
    "assert list(map(inc, [1, 2])) == [2, 3] and sorted([3, 1], key=inc) == [1, 3]",
    (
        "assert vars(Item('a')) == {'name': 'a', 'price': 1.5} and Item('a').__dict__['name'] == 'a' "
        "and getattr(Item('a'), 'name') == 'a'"
    ),
    (
        "i = Item('a')\n"
        "setattr(i, 'name', 'b')\n"
        "i.price += 1\n"
        "assert i.name == 'b' and i.price == 2.5\n"
        "del i.name\n"
        "assert not hasattr(i, 'name')"
    ),
    "assert eval('inc(1)') == 2 and inc(1) == 2",
    "def check(candidate):\n    assert candidate(1) == 2\ncheck(inc)",
    "for x, y in [(1, 2), (2, 3)]:\n    assert inc(x) == y, f'{x}'",
    (
        "from functools import reduce, partial\n"
        "assert partial(inc, 1)() == 2 and reduce(lambda a, b: inc(a) + b, [1, 2]) == 4"
    ),
    "assert [inc(x) for x in range(3)] == [1, 2, 3] and {inc(1): 'a'} == {2: 'a'}",
    "import json\nassert json.dumps(pair()) == '[1, [2]]' and json.dumps(counts('a')) == '{\"a\": 1}'",
    "match point():\n    case (x, y): assert x == 3\n    case _: assert False",
    "match item():\n    case Item(name=n): assert n == 'a'\n    case _: assert False",
]

OTHER_PROGRAM = """
import contextlib, dataclasses, collections, asyncio, json, decimal
import queue, functools, logging, warnings, itertools, time
class DiskError(OSError): pass
class Many(ExceptionGroup): pass
class Nested:
    class Inner(Exception): pass
    def go(self): raise Nested.Inner("x")
@dataclasses.dataclass
class Bad(Exception):
    code: int
def disk(): raise DiskError(2, "no")
def osx(): raise FileNotFoundError(2, "gone", "f.txt")
def js(): return json.loads("{")
def dec(): raise decimal.InvalidOperation("x")
def q(): queue.Queue().get_nowait()
def bad(): raise Bad(5)
def many(): raise ExceptionGroup("g", [ValueError("a"), KeyError("b")])
def custom_base(): raise type("Dyn", (ValueError,), {})("dyn")
class Ctx(contextlib.AbstractContextManager):
    def __exit__(self, *a): return None
def warn(): warnings.warn("old", DeprecationWarning); return 1
def logs(): logging.getLogger("x").warning("careful")
@contextlib.asynccontextmanager
async def opened():
    yield 7
async def slow(): await asyncio.sleep(10)
class Ait:
    def __init__(self): self.n = 0
    def __aiter__(self): return self
    async def __anext__(self):
        self.n += 1
        if self.n > 2: raise StopAsyncIteration
        return self.n
class Aw:
    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        return 9
@dataclasses.dataclass
class Tree:
    v: int
    kids: list = dataclasses.field(default_factory=list)
def tree(): return Tree(1, [Tree(2)])
class LRU:
    def __init__(self, n): self.d = collections.OrderedDict(); self.n = n
    def get(self, k): return self.d.get(k, -1)
    def put(self, k, v): self.d[k] = v
class Matrix:
    def __init__(self, rows): self.rows = rows
    def __matmul__(self, o): return Matrix([[sum(a*b for a, b in zip(r, c)) for c in zip(*o.rows)] for r in self.rows])
    def __eq__(self, o): return self.rows == o.rows
    def __getitem__(self, ij): return self.rows[ij[0]][ij[1]]
    def __setitem__(self, ij, v): self.rows[ij[0]][ij[1]] = v
    def __iter__(self): return iter(self.rows)
    def __call__(self, x): return x
class Meta:
    x = property(lambda self: 3)
    @functools.cached_property
    def y(self): return 4
    def __format__(self, s): return "F" + s
    def __round__(self, n=None): return 5
    def __reversed__(self): return iter([2, 1])
    def __int__(self): return 7
    def __index__(self): return 2
    def __bytes__(self): return b"m"
    def __complex__(self): return 1j
def swap(p): return p._replace(left=2)
def nodes():
    a = Tree(1); a.kids.append(a); return a
def visit(t): return [t.v] + [x for k in t.kids for x in visit(k)]
def run_all(fs): return [f() for f in fs]
def each(xs, f):
    for x in xs: f(x)
def kwonly(**kw): return kw
def star(*a): return a
def compose(*fs): return lambda x: functools.reduce(lambda v, f: f(v), fs, x)
def echo(x): return x
def printer(n):
    for i in range(n): print(i, end=" ")
    print()
def greet():
    name = input("Name: ")
    print(f"Hi {name}")
def prints_err(): import sys; sys.stderr.write("E")
def mk(): return Matrix([[1]])
class Node:
    def __init__(self, val, left=None, right=None): self.val, self.left, self.right = val, left, right
def depth(n): return 0 if n is None else 1 + max(depth(n.left), depth(n.right))
class Base:
    def __init_subclass__(cls): pass
    def name(self): return type(self).__name__
class Kid(Base): pass
CONST = {"a": [1]}
def nested_gen(): return [iter([1]), (x for x in [2])]
def cmp(a, b): return a is b
"""

MORE_TESTS = [
    "try: disk()\nexcept DiskError as e: assert e.errno == 2",
    "try: disk()\nexcept OSError: pass",
    "try: osx()\nexcept FileNotFoundError as e: assert e.errno == 2 and e.filename == 'f.txt'",
    "import json\ntry: js()\nexcept json.JSONDecodeError: pass",
    "try: js()\nexcept ValueError: pass",
    "import decimal\ntry: dec()\nexcept decimal.InvalidOperation: pass",
    "import queue\ntry: q()\nexcept queue.Empty: pass",
    "try: bad()\nexcept Bad as e: assert e.code == 5",
    "try: many()\nexcept* ValueError as g: assert len(g.exceptions) == 1\nexcept* KeyError: pass",
    "try: custom_base()\nexcept ValueError as e: assert str(e) == 'dyn' and type(e).__name__ == 'Dyn'",
    "try: Nested().go()\nexcept Nested.Inner as e: assert str(e) == 'x'",
    "import contextlib\nwith contextlib.suppress(DiskError): disk()",
    (
        "import unittest\n"
        "class T(unittest.TestCase):\n"
        "    def test(self):\n"
        "        with self.assertRaises(Bad) as c: bad()\n"
        "        self.assertEqual(c.exception.code, 5)\n"
        "        self.assertRaises((DiskError, Bad), bad)"
    ),
    "import traceback\ntry: bad()\nexcept Exception as e: assert 'Bad' in traceback.format_exc() and 'Bad' in repr(e)",
    "with Ctx() as c: assert c is not None",
    "import asyncio\nasync def m():\n    async with opened() as x: return x\nassert asyncio.run(m()) == 7",
    (
        "import asyncio\n"
        "async def m():\n"
        "    try: await asyncio.wait_for(slow(), 0.05)\n"
        "    except asyncio.TimeoutError: return 1\n"
        "assert asyncio.run(m()) == 1"
    ),
    "import asyncio\nasync def m(): return [x async for x in Ait()]\nassert asyncio.run(m()) == [1, 2]",
    "import asyncio\nasync def m(): return await Aw()\nassert asyncio.run(m()) == 9",
    (
        "import asyncio\n"
        "async def m():\n"
        "    t = asyncio.create_task(slow())\n"
        "    await asyncio.sleep(0.01)\n"
        "    t.cancel()\n"
        "    try: await t\n"
        "    except asyncio.CancelledError: return 1\n"
        "assert asyncio.run(m()) == 1"
    ),
    (
        "import asyncio\n"
        "async def m():\n"
        "    async with asyncio.TaskGroup() as g: t = g.create_task(m2())\n"
        "    return t.result()\n"
        "async def m2(): return await Aw()\n"
        "assert asyncio.run(m()) == 9"
    ),
    "import dataclasses as d\nassert d.asdict(tree()) == {'v': 1, 'kids': [{'v': 2, 'kids': []}]}",
    (
        "assert tree() == Tree(1, [Tree(2)]) and tree().kids[0].v == 2 and str(tree()) == 'Tree(v=1, "
        "kids=[Tree(v=2, kids=[])])'"
    ),
    "t = tree()\nt.kids.append(Tree(3))\nassert len(t.kids) == 1 or len(t.kids) == 2",
    "c = LRU(2)\nc.put(1, 1)\nassert c.get(1) == 1 and c.get(2) == -1",
    (
        "a = Matrix([[1, 2], [3, 4]])\n"
        "assert a @ a == Matrix([[7, 10], [15, 22]]) and a[0, 1] == 2 and [r for r in a] == [[1, 2], "
        "[3, 4]] and a(5) == 5\n"
        "a[0, 0] = 9\n"
        "assert a[0, 0] == 9"
    ),
    (
        "m = Meta()\n"
        "assert m.x == 3 and m.y == 4 and f'{m:z}' == 'Fz' and round(m) == 5 and list(reversed(m)) == "
        "[2, 1] and int(m) == 7 and [0, 1, 2][m] == 2 and bytes(m) == b'm' and complex(m) == 1j and m.y "
        "== 4"
    ),
    (
        "from collections import namedtuple\n"
        "P = namedtuple('P', 'left right')\n"
        "assert swap(P(1, 3)).left == 2 and swap(P(1, 3)) == (2, 3)"
    ),
    "n = nodes()\nassert n.kids[0] is n and n.kids[0].kids[0].v == 1",
    "assert visit(Tree(1, [Tree(2), Tree(3)])) == [1, 2, 3]",
    "assert run_all([lambda: 1, lambda: echo(2)]) == [1, 2]",
    "out = []\neach([1, 2], out.append)\nassert out == [1, 2]",
    "out = []\neach([1, 2], lambda x: out.append(echo(x) + 1))\nassert out == [2, 3]",
    (
        "assert kwonly(a=1, target=2, self=3, operation=4) == {'a': 1, 'target': 2, 'self': 3, "
        "'operation': 4} and star(1, *[2]) == (1, 2)"
    ),
    "assert compose(lambda x: x + 1, str, len)(99) == 3",
    (
        "import io\n"
        "from contextlib import redirect_stdout\n"
        "with io.StringIO() as b, redirect_stdout(b):\n"
        "    printer(3)\n"
        "    assert b.getvalue() == '0 1 2 \\n'"
    ),
    (
        "import io, sys\n"
        "from unittest.mock import patch\n"
        "@patch('builtins.input', return_value='Ann')\n"
        "@patch('sys.stdout', new_callable=io.StringIO)\n"
        "def test_greet(out, inp):\n"
        "    greet()\n"
        "    assert out.getvalue() == 'Hi Ann\\n'\n"
        "test_greet()"
    ),
    (
        "import io\n"
        "from contextlib import redirect_stderr\n"
        "e = io.StringIO()\n"
        "with redirect_stderr(e): prints_err()\n"
        "assert e.getvalue() == 'E'"
    ),
    (
        "import io, contextlib\n"
        "def capture(fn, *a):\n"
        "    s = io.StringIO()\n"
        "    with contextlib.redirect_stdout(s): fn(*a)\n"
        "    return s.getvalue()\n"
        "assert capture(printer, 2) == '0 1 \\n' and capture(printer, 1) == '0 \\n'"
    ),
    "assert mk() == Matrix([[1]]) and mk()[0, 0] == 1",
    "assert depth(Node(1, Node(2), Node(3, Node(4)))) == 3",
    (
        "class Node:\n"
        "    def __init__(self, val, left=None, right=None): self.val, self.left, self.right = val, "
        "left, right\n"
        "assert depth(Node(1, Node(2))) == 2"
    ),
    "assert Kid().name() == 'Kid' and Kid.__mro__[1] is Base and Kid.__name__ == 'Kid' and Kid.__bases__ == (Base,)",
    "assert CONST == {'a': [1]} and CONST['a'][0] == 1",
    "a, b = nested_gen()\nassert list(a) == [1] and next(b) == 2",
    "assert echo(Tree(1)).v == 1 and echo([Tree(1)])[0].v == 1 and echo({'t': Tree(1)})['t'].v == 1",
    "from fractions import Fraction as F\nassert echo([F(1, 2), {'x': (1, b'a')}]) == [F(1, 2), {'x': (1, b'a')}]",
    (
        "import unittest\n"
        "class T(unittest.TestCase):\n"
        "    def setUp(self): self.t = Tree(1)\n"
        "    def test(self):\n"
        "        self.assertEqual(self.t.v, 1)\n"
        "        self.assertIsInstance(self.t, Tree)\n"
        "        self.assertEqual(echo(self.t), self.t)\n"
        "        self.assertTrue(hasattr(self.t, 'kids'))\n"
        "        self.assertListEqual(visit(self.t), [1])\n"
        "        self.assertDictEqual(kwonly(a=1), {'a': 1})\n"
        "        self.assertAlmostEqual(echo(0.1), 0.1)\n"
        "        self.assertIsNone(each([], print))\n"
        "if __name__ == '__main__':\n"
        "    unittest.main()"
    ),
    "import sys\nassert sys.stdin is not None and echo(1) == 1",
    "import time\nt = time.perf_counter()\necho(1)\nassert time.perf_counter() - t < 5",
    "import random\nrandom.seed(1)\nxs = [random.random() for _ in range(3)]\nassert echo(xs) == xs",
]
