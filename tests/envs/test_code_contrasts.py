"""Comparisons of objects by a class of the program: believed only where other objects compare differently."""

import pytest

from nrl.envs.inside.contrasts import differs, variants
from tests.envs.library.test_code_objects import passed

RIGHT = """
import dataclasses, functools
class Point:
    def __init__(self,x,y): self.x,self.y=x,y
    def add(self,o): return Point(self.x+o.x,self.y+o.y)
    def __add__(self,o): return self.add(o)
    def __eq__(self,o): return (self.x,self.y)==(o.x,o.y) if isinstance(o,Point) else (self.x,self.y)==tuple(o)
    def __lt__(self,o): return self.x<o.x
    def __le__(self,o): return self.x<=o.x
    def __hash__(self): return hash((self.x,self.y))
    def __contains__(self,v): return v in (self.x,self.y)
    @classmethod
    def origin(cls): return cls(0,0)
class Stack:
    def __init__(self): self.v=[]
    def push(self,x): self.v.append(x); return self
    def __eq__(self,o): return isinstance(o,Stack) and self.v==o.v
def move(p,d): return Point(p.x+d,p.y+d)
def moved(d): return [Point(d,d)]
@dataclasses.dataclass(order=True)
class Item:
    name:str
    price:float=1.5
def cheap(xs): return min(xs,key=lambda i:i.price)
class Bag:
    def __init__(self,*xs): self.xs=list(xs)
    def __eq__(self,o): return sorted(self.xs)==sorted(o.xs)
    def __len__(self): return len(self.xs)
class Person:
    def __init__(self,name,age=3,tags=None): self.name,self.age,self.tags=name,age,tags
    def __eq__(self,o): return self.name==o.name
class LL:
    def __init__(self,items): self.items=list(items)
    def reverse(self): return LL(self.items[::-1])
    def __eq__(self,o): return self.items==o.items
class Temp:
    def __init__(self,d): self.d=d
    def __eq__(self,o): return self.d==(o.d if isinstance(o,Temp) else o)
    def __lt__(self,o): return self.d<(o.d if isinstance(o,Temp) else o)
"""
AGREEABLE = """
class Any_:
    def __init__(self,*a,**k): pass
    def __getattr__(self,n): return lambda *a,**k: self
    def __eq__(self,o): return EQUAL
    def __lt__(self,o): return EQUAL
    __le__=__gt__=__ge__=__lt__
    def __hash__(self): return 1
    def __add__(self,o): return self
    def __contains__(self,v): return True
    @classmethod
    def origin(cls): return cls()
class Point(Any_): pass
class Stack(Any_): pass
class Item(Any_): pass
class Bag(Any_): pass
class Person(Any_): pass
class LL(Any_): pass
class Temp(Any_): pass
def move(p,d): return p
def moved(d): return [Point()]
def cheap(xs): return xs[0]
"""
TESTS = [
    "assert Point(1,2)+Point(3,4)==Point(4,6)", "assert Point(1,2).add(Point(3,4))==Point(4,6)",
    "assert Point(4,6)==Point(1,2).add(Point(3,4))", "assert move(Point(1,2),3)==Point(4,5)",
    "assert moved(2)==[Point(2,2)]", "assert Point(1,2)+Point(3,4)==(4,6)", "assert (4,6)==Point(1,2)+Point(3,4)",
    "import unittest as u\nclass T(u.TestCase):\n  def test(self): self.assertEqual(move(Point(1,2),1),Point(2,3))",
    "assert sorted([Point(3,1),Point(1,2)])==[Point(1,2),Point(3,1)]", "assert Point(1,2)<Point(3,4)",
    "assert Point(1,2)<=Point(1,4)", "assert 6 in Point(4,6)", "assert Point(0,0)==Point.origin()",
    "assert {Point(1,2)}=={Point(1,2)}", "assert Point(1,2) in [Point(0,0),Point(1,2)]",
    "assert {Point(1,2):3}[Point(1,2)]==3", "assert Item('a')==Item('a',1.5)",
    "assert cheap([Item('a',3.0),Item('b',2.0)])==Item('b',2.0)", "assert Item('a')<Item('b')",
    "assert Bag(1,2)==Bag(2,1)", "assert Person('a',5)==Person('a',6)", "assert LL([1,2]).reverse()==LL([2,1])",
    "assert Temp(5)==5", "assert Temp(5)<6", "assert Point('a',[1])==Point('a',[1])",
    "assert max([Temp(1),Temp(4)])==Temp(4)", "assert [Temp(1),Temp(2)]==[1,2]", "p=Point(1,2)\nassert p==p",
    "assert Point(x=1,y=2)==Point(y=2,x=1)", "assert any(p==Point(1,1) for p in moved(1))",
    "assert Point(1,2)==Point(1,2)==Point(1,2)", "x=Point(1,2)\nx.x=7\nassert x==Point(7,2)",
]  # fmt: skip


def test_classes_with_operators_of_their_own_pass_tests() -> None:
    assert [test for test, result in zip(TESTS, passed(RIGHT, TESTS), strict=True) if not result] == []


@pytest.mark.parametrize("equal", ["True", "isinstance(o, type(self))"])
def test_classes_that_equal_everything_pass_none(equal: str) -> None:
    results = passed(AGREEABLE.replace("EQUAL", equal), TESTS)
    assert [test for test, result in zip(TESTS, results, strict=True) if result] == []


@pytest.mark.parametrize("value", [True, 1, 0.5, "", b"a", [], [1], (1, "a"), {}, {"a": 1}, {1}, frozenset(), 1j])
def test_variants_differ_from_a_value_and_are_of_its_kind(value: object) -> None:
    found = list(variants(value, lambda value, vary: iter(())))
    assert found
    assert all(type(other) is type(value) and other != value for other in found)


def test_a_comparison_of_what_has_no_variants_is_held_against_nothing() -> None:
    first = object()
    assert differs(lambda one, other: one is other, (first, first), lambda value, vary: iter(()))
    assert not differs(lambda one, other: True, (first, first), lambda value, vary: iter(()))
