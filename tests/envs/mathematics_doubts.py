"""Answers that look right and are not, and the other way round: those that are right for a reference, then the others.

``¦`` stands between two of them.
"""

from collections.abc import Mapping

__all__ = ["BOXED", "NUMBERS", "RESPONSES"]

BOXED: Mapping[str, tuple[str, str]] = {
    "16": (
        (
            r"16 apples ¦ 16\text{ apples} ¦ 16 cm ¦ 16\text{ cm} ¦ 16\text{ square units} ¦ 16 units ¦ "
            r"16\text{ students} ¦ 16 ways ¦ 16\text{ ways} ¦ 16\text{ different ways} ¦ 16 \text{ years old} ¦ "
            r"16\text{ miles per hour} ¦ 16 dollars ¦ \$16 ¦ 16\text{ km/h} ¦ 16 red balls ¦ 16\text{ square feet} ¦ "
            r"16\text{ cubic inches} ¦ 16\text{ positive integers} ¦ 16 people ¦ 16 hours ¦ 16\text{ m}^2 ¦ "
            r"16~\text{cm} ¦ 16\,\mathrm{cm} ¦ 16\text{ sq. units} ¦ 16\text{ days} ¦ 16\text{ units}^2 ¦ "
            r"16\text{ diagonals} ¦ 16\text{ solutions} ¦ 16\text{ dollars per hour} ¦ 16 years ¦ "
            r"16 \text{ pounds} ¦ 16 books ¦ 16\text{ games} ¦ 16^\circ ¦ 16 \text{ degrees} ¦ 16 points ¦ "
            r"16 pages ¦ 16 cents ¦ 16 eggs ¦ 16\text{ marbles} ¦ 16 seconds ¦ 16\text{ meters} ¦ "
            r"16 liters of water ¦ 16\text{ cups of flour} ¦ 16 \text{ feet} ¦ 16 inches ¦ 16\text{ gallons} ¦ "
            r"16\text{ calories} ¦ 16\text{ triangles} ¦ 16\text{ numbers} ¦ 16\text{ values} ¦ "
            r"16\text{ blue marbles} ¦ 16\text{ minutes} ¦ 16% ¦ 16\% ¦ 16 percent ¦ (16) ¦ 16.0 ¦ 16. ¦ +16 ¦ "
            r"\mathbf{16} ¦ {16} ¦ 16\; ¦ 016 ¦ \frac{32}{2} ¦ 16, ¦ \left(16\right) ¦ sixteen ¦ \text{sixteen}"
        ),
        (
            r"16\text{ or more} ¦ 16 dozen ¦ 16 score ¦ 16 squared ¦ 16 is wrong ¦ 16 is not the answer ¦ "
            r"16 at most ¦ 16 percent off ¦ 16\text{ at least} ¦ 16\text{ or less} ¦ 16\text{ thousand} ¦ "
            r"16 hundred ¦ 16 million ¦ 16 pairs ¦ 16 cubed ¦ 16 halves ¦ 16 thirds ¦ 16\text{ times } 2 ¦ "
            r"16\text{ divided by }2 ¦ 16\text{ minus one} ¦ 16 plus some ¦ 16 is incorrect ¦ 16\text{ (wrong)} ¦ "
            r"16\text{ maybe} ¦ 16\text{ or so} ¦ 16\text{ approximately} ¦ 16\text{ if } x>0 ¦ 16 unless n is odd ¦ "
            "16 more than x ¦ 16 less than the total ¦ 16 fewer ¦ 16 gross ¦ 16 tenths ¦ 16 quarters ¦ "
            r"16 to the power two ¦ 16\text{ not} ¦ 16\text{ or } 17 ¦ 16\text{ to }17 ¦ 16 factorial ¦ "
            "16 below zero ¦ 16 remaining out of some ¦ 16 and counting ¦ 16 and a half ¦ 16 point five ¦ "
            r"16 over two ¦ 16\text{ and a half} ¦ 16 choose two ¦ 16 mod seven ¦ 16 base eight ¦ 16 or higher ¦ "
            "16 minimum ¦ 16 maximum ¦ 16 exclusive ¦ 16 ish ¦ 16 something ¦ 16 does not work ¦ 16 false ¦ "
            "16 guess ¦ 16 possibly ¦ 16 perhaps ¦ 16 doubled ¦ 16 twice ¦ 16 each of two ¦ 16 negative ¦ "
            r"16 cannot be ¦ 16\text{ is the answer to another question} ¦ 16 per cent ¦ 16\text{ lakh} ¦ 16 bn ¦ "
            "16 k ¦ 16K ¦ 16M ¦ 16 mil ¦ 16 bits too many ¦ 16 or thereabouts ¦ 16 upwards ¦ 16 radicals two ¦ "
            "16 roots of two ¦ 16 pi ¦ 16 e ¦ 16 degrees below zero ¦ 16 units short ¦ 16 units less ¦ 16 no ¦ "
            r"16\text{ is impossible} ¦ 16 \text{ but not really} ¦ 16 multiples ¦ 16 nonillion ¦ 16 trillionths ¦ "
            "16 minus ¦ 16 dozens ¦ 16 scores ¦ 16 couples ¦ 16 couple ¦ 16 twos ¦ 16 tens ¦ 16 hundreds ¦ "
            "16 fifths ¦ 16 x 2 ¦ 16 double ¦ 16 triple ¦ 16 inverse ¦ 16 reciprocal ¦ 16 complement ¦ "
            "16 opposite ¦ 16 square root ¦ 16 log ¦ 16 reversed ¦ 16 remainder one ¦ 16 quotient ¦ 16 th power ¦ "
            r"16 powers of two ¦ 16\pmod{17} ¦ [16] ¦ (16,) ¦ --16 ¦ \overline{16} ¦ 16_7 ¦ 16 mod 17 ¦ +-16 ¦ -16 ¦ "
            r"\bar{16} ¦ \vec{16} ¦ \hat{16} ¦ |16| ¦ [[16]] ¦ (16,16) ¦ \tilde{16} ¦ \dot{16} ¦ \sqrt{16} ¦ 16' ¦ "
            r"16^2 ¦ 16^ ¦ 16!! ¦ \lfloor 16\rfloor ¦ \#16 ¦ 16\ldots ¦ 16... ¦ \neg 16 ¦ \Delta 16 ¦ \pm 16 ¦ "
            r"16 ; 17 ¦ \binom{16}{1} ¦ ++16 ¦ - -16 ¦ -(-16) ¦ \cancel{16} ¦ \not 16 ¦ \approx 16.4 ¦ "
            r"16 \text{ apples or oranges} ¦ sixty ¦ seventeen ¦ sixteen hundred ¦ sixteenth ¦ "
            r"sixteen or seventeen ¦ 16\text{ percent off} ¦ 16 short ¦ 16\text{ at minimum} ¦ 16 thousandfold ¦ "
            r"16fold ¦ 16-fold ¦ 16 times as many ¦ 16 times ¦ 16\times ¦ 16 per ¦ 16\text{ per} ¦ 16 of ¦ 16 %% ¦ "
            r"16\%\% ¦ 16 ) ¦ 16 plus ¦ 16 + ¦ 16 - ¦ 16 = ¦ 16 > ¦ 16 \leq ¦ 16 inclusive ¦ 16 each ¦ 16 apiece ¦ "
            r"16 (each) ¦ 16\text{ (or 17)} ¦ 16\text{, maybe} ¦ 16\text{, not } 17 ¦ 16\text{; no} ¦ "
            r"16\text{, I think, or }17 ¦ 16, 16 ¦ 16 16 ¦ 16\text{ xor }17 ¦ 16\text{ vs }17 ¦ "
            r"\text{either }16\text{ or }17 ¦ \text{not }16 ¦ \text{at least }16 ¦ \text{no more than }16 ¦ "
            r"\text{over }16 ¦ \text{more than }16 ¦ \text{less than }16 ¦ \text{approximately }16 ¦ "
            r"\text{about }16 ¦ \text{page }16 ¦ \text{between }15\text{ and }16 ¦ 15\text{ to }16 ¦ 15\text{--}16 ¦ "
            r"15-16 ¦ 15..16 ¦ 15\sim16 ¦ 15~16 ¦ \text{something other than }16 ¦ \text{anything but }16 ¦ \neg16 ¦ "
            r"\underline{16}x ¦ 16\text{ is false} ¦ 16\text{ was my first guess} ¦ 16\text{ doesn't work} ¦ "
            r"16\text{ fails} ¦ 16\text{ would be wrong} ¦ 16\text{ isn't} ¦ 16\text{ nope} ¦ 16\text{ hundredths} ¦ "
            r"16\text{ k} ¦ 16\text{ bn} ¦ 16\text{ mil} ¦ 16\text{ tenfold} ¦ 16\text{ doubled} ¦ "
            r"16\text{ to the third} ¦ 16^{\text{th}} ¦ 16th ¦ 16/17 ¦ 16# ¦ #16 ¦ No. 16 ¦ 16a ¦ 16A ¦ a16 ¦ 16_2 ¦ "
            r"16_{\text{hex}} ¦ 0x16 ¦ 16e1 ¦ 16e ¦ 16i ¦ 16j ¦ 1.6 ¦ \mp16 ¦ 016.5 ¦ 16,000 ¦ 16.000.000 ¦ 16:00 ¦ "
            r"16/0 ¦ 0/16 ¦ 16\cdot0 ¦ 16… ¦ \frac{16}{} ¦ \sqrt{256} ¦ 4^2 ¦ 20-4 ¦ \log_2 65536 ¦ |{-16}| ¦ "
            r"\max(16,2) ¦ \lceil15.5\rceil ¦ 16\mod 20 ¦ 16\bmod 20 ¦ \infty ¦ NaN ¦ None ¦ \{16,17\} ¦ (16,17) ¦ "
            r"[16,17] ¦ 16<x ¦ x<16 ¦ x=16 or y=17 ¦ x\neq16 ¦ x\approx16.2 ¦ y=16x ¦ 16=17 ¦ 17=16 ¦ 16=15+2 ¦ "
            r"f(16) ¦ P(16) ¦ 16\to17 ¦ 16\implies17 ¦ 16\Rightarrow 17 ¦ \therefore 17 ¦ 16? ¦ 16?? ¦ ?16 ¦ 16! ¦ "
            r"16\text{?} ¦ (16)(1) ¦ 16(1) ¦ 1(16) ¦ 16() ¦ {16,} ¦ ((16),) ¦ <16> ¦ 16&17 ¦ 16|17 ¦ 16 /17"
        ),
    ),
    "3 dozen": ("36 ¦ 3 dozen", ""),
    "16 squared": ("", "16"),
    "16 or more": (r"16 \text{ or more} ¦ 16\text{ or more}", "16 ¦ 15 or more"),
    r"16\text{ apples}": ("16 ¦ 16 apples", ""),
    r"16\text{ or more}": ("", "16 apples"),
    "x>2": (r"x>2 ¦ 2<x ¦ (2,\infty) ¦ x > \frac{4}{2}", "x>5-3 ¦ x>1+1"),
    "[1,2]": (r"[1,2] ¦ 1\le x\le 2 ¦ [1,\frac{4}{2}]", r"[1,1+1] ¦ [\sqrt{1},2] ¦ [2-1,2] ¦ 1 \le x \le 1+1"),
    "(1,2)": ("", "(1,1+1) ¦ (1,3-1)"),
    "3:4": (r"3:4 ¦ 6:8 ¦ \frac{3}{4}", "(1+2):4 ¦ 3:2+2 ¦ 3:2^2"),
    "3+4i": ("3+4i ¦ 4i+3", "(2+i)^2 ¦ (2+i)(2+i) ¦ 1+2+4i ¦ 3+(5-1)i"),
    r"\{1,2\}": ("", r"\{1,1+1\} ¦ \{2-1,2\}"),
    "1,2": ("", "1,1+1"),
    r"\begin{pmatrix}1&2\\3&4\end{pmatrix}": (
        r"\begin{pmatrix}1&2\\3&\frac{8}{2}\end{pmatrix}",
        r"\begin{pmatrix}1&1+1\\3&4\end{pmatrix}",
    ),
    "y=2x+1": ("y=1+2x", ""),
    "y=5": ("", "y=2+3"),
    "x=2,y=3": ("", "x=1+1,y=3"),
    "(2,3)": ("", "(1+1,3)"),
    "x=2": ("", "x=1+1"),
    "5 cm": ("", r"2+3 cm ¦ (2+3)\text{ cm}"),
    r"50\%": ("", r"25+25\%"),
    "-5": ("", "-(2+3) ¦ 2-7"),
    r"x\ge 3": ("", r"x\ge \sqrt{9} ¦ x \ge 6/2+0"),
    r"(-\infty,2)\cup(3,\infty)": ("", r"(-\infty,1+1)\cup(3,\infty)"),
    "x^2+2x+1": ("(x+1)^2", ""),
    "(x+1)^2": ("x^2+2x+1", ""),
    r"x\ne 2": ("", r"x \ne 1+1"),
    "|x|<2": ("", "|x|<1+1"),
    r"2 \pmod 5": ("", r"1+1 \pmod 5"),
    "12 R3": ("12 R3", ""),
    "5": (r"5个 ¦ 5\text{个} ¦ 5种 ¦ 5人 ¦ 5厘米 ¦ 5元 ¦ 5 cm", r"5+0 ¦ 10/2+0 ¦ 5 \cdot 1 ¦ 05:00 ¦ 5 \text{ am}"),
    r"2\sqrt{3}": (r"\sqrt{12}", ""),
    "101_2": ("", "100_2+1_2 ¦ 100_2+1"),
    "(0,1)": ("", r"(0,\sin(\pi/2)) ¦ (0,\cos 0)"),
    "(0,1]": ("", r"(0, \log 10] ¦ (0,0!]"),
    "2+3i": ("", r"2+(1+2)i ¦ \sqrt{4}+3i"),
    r"\frac{1}{2}+i": (r"\frac{1+2i}{2} ¦ 0.5+i", ""),
    "1:2:3": ("", "1:2:1+2 ¦ 1:2:(1+2)"),
    "x<-1": ("x<-1", "x<1-2"),
    "[-1,1]": (r"[-1,1] ¦ -1\le x\le 1 ¦ [-1.0,1]", ""),
    "3 apples": (
        "3 ¦ 3 apples ¦ 3 apple",
        "3 oranges ¦ 3 cm ¦ 3 pairs of apples ¦ 3 dozen apples ¦ 4 apples ¦ 3 apples or pears ¦ 3 half apples",
    ),
    "3 cm": ("", "3 cats ¦ 3 kg ¦ 3 mm ¦ 3 cm^2 ¦ 3 dozen cm"),
    "3 cats": ("", "3 cm ¦ 3 dogs"),
    "3": (r"3 cats ¦ 3 cm ¦ 3\text{ units} ¦ three ¦ \text{three} ¦ 3 apples", ""),
    r"\ln|x|+C": (r"\ln|x|+C ¦ \ln\left|x\right|+C ¦ C+\ln|x| ¦ \ln |x| +C", r"\ln x+C"),
    "|x|": ("", "x"),
    r"\sqrt{x^2}": ("|x|", "x"),
    r"\ln|\sin x|+C": ("", r"\ln\sin x+C"),
    r"\ln|x-1|": ("", r"\ln(x-1)"),
    r"\ln(x^2)": (r"2\ln|x|", ""),
    r"\frac{1}{2}\ln|x^2-1|": ("", r"\frac12\ln(x^2-1)"),
    "x^{2/3}": (r"\sqrt[3]{x^2}", ""),
    r"\ln x": (r"\ln x ¦ \log_e x", ""),
    r"2\ln x": (r"\ln x+\ln x", ""),
    r"\sqrt{x^4}": ("x^2", ""),
    r"\arctan x": (r"\tan^{-1} x", ""),
    r"\log_2 x": (r"\frac{\ln x}{\ln 2}", ""),
    r"x\sqrt{x}": ("x^{3/2}", ""),
    r"\frac{1}{\sqrt{x}}": ("x^{-1/2}", ""),
    "1e-150": ("", "2e-150 ¦ 0 ¦ 1e-151"),
    "1e-300": ("", "1.5e-300"),
    r"\sqrt{2}\cdot 10^{-150}": ("", r"\sqrt{3}\cdot 10^{-150}"),
    r"\frac{\pi}{10^{200}}": (
        r"\pi\cdot 10^{-200} ¦ \frac{2\pi}{2\cdot 10^{200}}",
        r"\frac{\pi}{10^{201}} ¦ \frac{e}{10^{200}} ¦ 0",
    ),
    "0": ("0 ¦ 0.0", r"\frac{\pi}{10^{200}} ¦ 1e-200 ¦ \sqrt{2}\cdot 10^{-160}"),
    "10^{-150}x": ("", r"2\cdot 10^{-150}x"),
    "e^{-400}": ("", "e^{-401} ¦ 0"),
    "e^{-1000}": ("", "0 ¦ e^{-1001}"),
    r"\sin(10^{-160})": ("", r"\sin(2\cdot10^{-160})"),
    r"\sqrt{2}+\sqrt{3}-\sqrt{5+2\sqrt6}": ("0", ""),
    "1+10^{-100}": ("", "1"),
    r"\sqrt{2}+10^{-100}": ("", r"\sqrt{2}"),
    r"\sqrt{2}+10^{-140}": ("", r"\sqrt{2}"),
    "A,C,D": (
        (
            r"\text{A, C, D} ¦ ACD ¦ A, C, D ¦ A,C,D ¦ D, A, C ¦ \text{ACD} ¦ A, C and D ¦ A、C、D ¦ "
            r"\text{A}, \text{C}, \text{D} ¦ A;C;D ¦ A C D"
        ),
        "A,C ¦ ABD ¦ A,B,C,D ¦ AC ¦ A",
    ),
    "ABD": (r"A,B,D ¦ ABD ¦ \text{ABD} ¦ A, B, D ¦ A、B、D ¦ \text{A, B, D}", "AB ¦ A,B ¦ ABCD ¦ D"),
    r"\text{A, C, D}": (r"ACD ¦ A,C,D ¦ \text{ACD}", ""),
    "①③": (r"①③ ¦ ③① ¦ ①,③ ¦ ①、③ ¦ \text{①③} ¦ ① and ③ ¦ ①\text{ and }③", "① ¦ ①② ¦ ①②③ ¦ ②③"),
    "①②④": ("①②④ ¦ ①,②,④", ""),
    "③": (r"③ ¦ \text{③}", "② ¦ ①③"),
    "正确": (r"正确 ¦ \text{正确}", "错误 ¦ 不正确"),
    "错误": ("错误", "正确"),
    "3个": ("3 ¦ 3个", "4个 ¦ 4"),
    "12平方厘米": (r"12 ¦ 12平方厘米 ¦ 12\text{ cm}^2 ¦ 12 cm^2 ¦ 12\text{平方厘米}", "12厘米 ¦ 13平方厘米"),
    "5元": ("5 ¦ 5元", ""),
    "30度": (r"30 ¦ 30^\circ ¦ 30度", ""),
    "2米": ("2 ¦ 2米 ¦ 2 m", ""),
    "是": ("是", "否 ¦ 不是"),
    "充分不必要条件": ("充分不必要条件", "必要不充分条件"),
    r"\geq 5": (r"\geq 5 ¦ x \geq 5 ¦ [5,\infty) ¦ \ge 5 ¦ x\ge5", r"5 ¦ \ge 6 ¦ \leq 5 ¦ > 5"),
    "> 3": (r"x>3 ¦ >3 ¦ (3,\infty)", ""),
    "x>3": (">3", ""),
    "< -2": ("x<-2", ""),
    r"\leq 7": ("", "7"),
    r"\lim=2": ("2", "3"),
    r"\lim_{x\to 0} f(x)=2": (r"2 ¦ \lim_{x\to0}f(x)=2", ""),
    "The answer is 7.": ("7", "8"),
    "7 (seven)": ("7", "8 ¦ 7 or 8"),
    "seven (7)": ("7", ""),
    "log(x)": (r"\log x ¦ log(x) ¦ \log(x)", "x"),
    "ln(x)": (r"\ln x", ""),
    "sin(x)": (r"\sin x", ""),
    "exp(x)": ("e^x", ""),
    "sqrt(x)": (r"\sqrt{x}", ""),
    "C_{10}^{3}": (r"120 ¦ C_{10}^3 ¦ \binom{10}{3} ¦ C_{10}^{3}", "720 ¦ 121"),
    "A_5^2": ("20 ¦ A_5^2 ¦ A_{5}^{2}", "10 ¦ 25"),
    "I": (r"I ¦ \text{I}", "II"),
    "P_5^2": ("20", ""),
    "C_n^2": (r"\frac{n(n-1)}{2} ¦ C_n^2 ¦ \binom{n}{2}", ""),
    "120": ("", "C_{10}^3"),
    "20": ("", "A_5^2"),
    "90 minutes": (
        (
            "1 hour 30 minutes ¦ 1.5 hours ¦ 90 minutes ¦ 90 ¦ 1 hour and 30 minutes ¦ "
            r"1\text{ hour } 30\text{ minutes} ¦ 1\frac{1}{2}\text{ hours} ¦ 1 \text{ hr } 30 \text{ min} ¦ "
            "1h 30min"
        ),
        "1 hour ¦ 1.5 ¦ 2 hours ¦ 1 hour 31 minutes ¦ 9 minutes",
    ),
    "1 hour 30 minutes": (
        "90 minutes ¦ 1.5 hours ¦ 1 hr 30 min ¦ 1 hour and 30 minutes",
        "1 hour 20 minutes ¦ 1 hour ¦ 30 minutes ¦ 1.3 hours",
    ),
    "12 cm": ("120 mm ¦ 0.12 m ¦ 12 ¦ 12 centimeters", "120 ¦ 12 mm ¦ 12 m ¦ 0.12 ¦ 120 m"),
    "120 mm": ("12 cm", ""),
    "$3.50": (r"350 cents ¦ 3.5 ¦ $3.50 ¦ 3.50 dollars ¦ \$3.50", "350 ¦ 350 dollars ¦ 35 cents"),
    "350 cents": ("$3.50 ¦ 350", "3.50"),
    "2 km": (r"2000 m ¦ 2000\text{ meters}", ""),
    "1 kg": ("1000 g", "1000 ¦ 100 g"),
    "5 feet 6 inches": ("66 inches ¦ 5.5 feet ¦ 5 ft 6 in", ""),
    "1 m^2": ("10000 cm^2", "100 cm^2"),
    "60 mph": ("", "60 km/h"),
    "36 km/h": ("10 m/s", "36 m/s ¦ 10 km/h"),
    "2 days": ("48 hours", ""),
    "1 foot": ("12 inches", ""),
    "3 yards": ("9 feet", ""),
    "1 L": ("1000 mL ¦ 1000 ml", ""),
    "1 mile": ("5280 feet", ""),
    "1 week": ("7 days", ""),
    "2 hours": ("120 minutes ¦ 7200 seconds", "1+1 hours ¦ (1+1) hours"),
    "1 month": ("", "30 days"),
    "1 inch": ("2.54 cm", ""),
    "25 °C": ("", "77 °F"),
    r"30^\circ": ("30 degrees", ""),
    "3 m 20 cm": ("320 cm ¦ 3.2 m", ""),
    "$5": ("", "€5 ¦ 5 apples ¦ 5 hours"),
    "36 eggs": ("36 ¦ 36 eggs", ""),
    "$2 million": ("2000000 ¦ 2 million dollars", ""),
    r"\emptyset": (
        (
            r"no real solution ¦ no real solutions ¦ no solution ¦ no solutions ¦ \text{no solution} ¦ "
            r"\text{No real solutions} ¦ \varnothing ¦ \{\} ¦ \text{There are no solutions} ¦ "
            r"\text{There is no solution} ¦ \text{no real roots} ¦ the empty set"
        ),
        "",
    ),
    "no solution": (
        r"\emptyset ¦ no real solutions ¦ There is no solution ¦ no solutions exist ¦ No solution.",
        r"0 ¦ 1 ¦ one solution ¦ \{0\} ¦ infinitely many solutions ¦ all real numbers",
    ),
    "no real solutions": (
        r"no solution ¦ \emptyset ¦ no real solution ¦ There are no real solutions. ¦ \text{No real solution}",
        "",
    ),
    "DNE": (
        (
            r"does not exist ¦ DNE ¦ \text{DNE} ¦ \text{does not exist} ¦ Does not exist. ¦ "
            "The limit does not exist ¦ dne"
        ),
        r"0 ¦ \infty ¦ exists",
    ),
    "does not exist": ("DNE", ""),
    "undefined": (r"\text{undefined}", "0 ¦ defined"),
    "infinitely many": (r"infinitely many ¦ infinitely many solutions ¦ \text{infinitely many}", "5 ¦ none"),
    "sixteen": ("16", ""),
    "42": ("forty-two ¦ forty two", ""),
    "100": ("one hundred ¦ a hundred", ""),
    "1234": ("one thousand two hundred thirty-four", ""),
    "one half": (r"1/2 ¦ \frac12", ""),
    "1/2": ("one half ¦ half", "one third ¦ half of one"),
    "2/3": ("two thirds ¦ two-thirds ¦ 2/3", ""),
    "3/4": ("three quarters ¦ three-fourths", ""),
    r"\tan\alpha=2": (r"2 ¦ \tan\alpha=2 ¦ \tan \alpha = 2", r"3 ¦ \sin\alpha=2 ¦ -2"),
    "|AB|=5": ("5 ¦ |AB|=5 ¦ AB=5", "6"),
    r"\sin A=\frac{1}{2}": (r"\frac12", ""),
    r"\cos\theta=\frac35": ("0.6 ¦ 3/5", ""),
    r"\angle ABC=60^\circ": (r"60 ¦ 60^\circ", ""),
    "S_{ABC}=12": ("12", ""),
    "S_n=n^2": ("n^2 ¦ S_n=n^2", ""),
    "a_n=2n-1": ("2n-1 ¦ a_n=2n-1", ""),
    "f(2)=5": ("5", ""),
    r"|\vec{a}|=3": ("3", ""),
    r"\overline{AB}=5": ("5", ""),
    "P(A)=1/2": ("1/2 ¦ 0.5", ""),
    "k=-1": ("-1", ""),
    "m<3": (r"(-\infty,3)", ""),
    r"|z|=\sqrt{5}": (r"\sqrt5", ""),
    r"V=12\pi": (r"12\pi", ""),
    "AB=5": ("5", ""),
    r"\log_2 3 = a": (r"\log_2 3=a", ""),
    "x^2+y^2=4": ("y^2+x^2=4 ¦ x^2+y^2-4=0", "4 ¦ x^2+y^2"),
    "y=x^2": ("y=x^2", ""),
    "2x+3y=6": ("", "6"),
    "40": ("40% ¦ 40", ""),
    r"\frac{3}{8}": (r"0.375 ¦ 3/8 ¦ 37.5% ¦ 37.5\%", ""),
    r"\frac{3}{4}": (r"3/4 ¦ 0.75 ¦ \dfrac34 ¦ \tfrac{3}{4} ¦ 75\% ¦ \frac{6}{8} ¦ \left(\frac34\right)", ""),
    r"\sqrt{51}": (r"\sqrt{51} ¦ sqrt(51) ¦ 51^{1/2}", ""),
    "6 - 5i": ("6-5i ¦ -5i+6", ""),
    "(-2,1)": ("(-2, 1) ¦ (-2,1)", ""),
    r"\left(3,\frac{\pi}{2}\right)": (r"(3,\pi/2)", ""),
    "p - q": ("p-q ¦ -q+p", "q-p"),
    r"\text{Evelyn}": ("Evelyn", ""),
    r"5\text{ inches}": (r"5 ¦ 5 inches ¦ 5\text{ in}", ""),
    r"1 \pm \sqrt{19}": (r"1+\sqrt{19}, 1-\sqrt{19} ¦ 1\pm\sqrt{19} ¦ 1-\sqrt{19}\text{ and }1+\sqrt{19}", ""),
    r"(-\infty, 2) \cup (3, \infty)": (
        r"x<2 \text{ or } x>3 ¦ x\in(-\infty,2)\cup(3,\infty)",
        r"(-\infty,2]\cup[3,\infty) ¦ 2<x<3",
    ),
    r"x \in [-2,7]": (r"[-2,7] ¦ -2\le x\le 7", ""),
    r"10\%": (r"10% ¦ 10 ¦ 10\text{ percent} ¦ 0.1", ""),
    r"\$32,\!348": (r"32348 ¦ \$32348 ¦ 32,348", ""),
    r"\begin{pmatrix} -1 \\ 2 \end{pmatrix}": (
        r"\begin{pmatrix}-1\\2\end{pmatrix} ¦ \begin{bmatrix}-1\\2\end{bmatrix}",
        "",
    ),
    r"\text{(A)}": (r"A ¦ (A) ¦ \textbf{(A)} ¦ \text{A} ¦ \mathrm{(A)} ¦ \text{(A) } 5", ""),
    "A": (r"\text{A}", r"B ¦ (B) ¦ \text{(B) A} ¦ A or B ¦ A, B ¦ not A ¦ \text{not A}"),
    "12_8": (r"12_8 ¦ 12_{8} ¦ 12_{\text{eight}}", ""),
    "4210_5": ("4210_5 ¦ 4210_{5}", "4210 ¦ 555"),
    r"3^{\frac{1}{3}}": (r"\sqrt[3]{3}", ""),
    r"2\sqrt{2}-2": (r"2(\sqrt{2}-1) ¦ -2+2\sqrt2", ""),
    "3, 5, 7": (r"3,5,7 ¦ 7,5,3 ¦ 3, 5, and 7 ¦ 3, 5, \text{ and } 7", "3,5 ¦ 3,5,7,9 ¦ 3 or 5"),
    r"-\frac{1}{2}": (r"-1/2 ¦ \frac{-1}{2} ¦ -.5 ¦ \frac{1}{-2}", ""),
    "y = 2x + 3": ("2x+3 ¦ y=2x+3 ¦ y-2x=3 ¦ y = 3+2x", ""),
    "y=2x+3": ("", "2x-3 ¦ y=2x"),
    "f(x) = x^2": ("x^2 ¦ f(x)=x^2", ""),
    "x=3": ("3 ¦ x = 3", r"x=4 ¦ y<3 ¦ x>3 ¦ x\ne 3"),
    r"\frac{\sqrt{6}-\sqrt{2}}{4}": (r"\frac{\sqrt6-\sqrt2}{4} ¦ \frac{\sqrt{6}}{4}-\frac{\sqrt{2}}{4}", ""),
    r"\sin 20^\circ": (r"\sin(20^\circ) ¦ \sin 20^{\circ}", ""),
    r"\frac{\pi}{3}": (r"\pi/3 ¦ \frac13\pi", "60"),
    "i": ("i", ""),
    "-i": ("-i", ""),
    "e": ("e", ""),
    r"\infty": (r"\infty ¦ infinity ¦ +\infty", ""),
    r"-\infty": ("", r"\infty"),
    r"\ln 2": (r"\ln 2 ¦ \ln(2) ¦ \log_e 2", ""),
    "1:30": ("1:30", ""),
    r"6:00 \text{ p.m.}": ("6:00 pm ¦ 6 p.m.", ""),
    "10^{-6}": ("10^{-6} ¦ 0.000001 ¦ 1e-6", ""),
    "2^{2009}": ("2^{2009}", "2^{2008}"),
    "5^{-1}": ("1/5", ""),
    r"\frac{9}{7}": (r"1\frac{2}{7}", ""),
    r"144\pi": (r"144\pi ¦ 144 \pi \text{ cm}^2 ¦ 144\pi\text{ square units}", r"144 ¦ 452.4 ¦ 144\pi^2"),
    r"k=\pm 2": (r"\pm2 ¦ 2,-2 ¦ k=2 \text{ or } k=-2", ""),
    "(x-3)(x+3)": ("(x+3)(x-3)", ""),
    r"\{1,2,3\}": (r"1,2,3 ¦ \{3,2,1\}", ""),
    "[2,5)": (r"2\le x<5", "[2,5] ¦ (2,5) ¦ (2,5]"),
    r"\mathbb{R}": (r"(-\infty,\infty) ¦ \text{all real numbers} ¦ x \in \mathbb{R}", ""),
    "x > -1": (r"(-1,\infty) ¦ -1<x", ""),
    "2,-1": (r"-1 and 2 ¦ x=2,x=-1 ¦ \{-1,2\}", ""),
    "17": ("", r"17.5 ¦ 16 ¦ 17x ¦ 1.7 ¦ 71 ¦ \frac{1}{17} ¦ 17 \text{ of } 20 ¦ 17:3 ¦ 17/20 ¦ 17 - 1"),
    "073": ("73 ¦ 073", ""),
    "73": (r"073 ¦ 73.0 ¦ \text{73} ¦ \mathbf{073}", ""),
    r"4.49\times 10^{33}": (r"4.49\times10^{33} ¦ 4.49e33", r"4.49\times 10^{32} ¦ 4.5e33"),
    r"9.8 \text{ m/s}^2": (r"9.8 ¦ 9.8\text{ m/s}^2 ¦ 9.8 m/s^2 ¦ 9.8~\mathrm{m/s^2}", ""),
    r"3 \times 10^{8} \text{ m/s}": (r"3\times10^8 ¦ 3e8", ""),
    r"1.6 \times 10^{-19}": (r"1.6e-19 ¦ 1.6\cdot 10^{-19}", "1.6e-18 ¦ 1.6 ¦ 0"),
    "4/5": (r"\frac{4}{5} ¦ 0.8", ""),
    r"x = \frac{1}{2}, y = \frac{3}{2}": (r"(\frac12,\frac32) ¦ x=1/2, y=3/2", r"(\frac32,\frac12)"),
    r"\frac{n(n+1)}{2}": (r"\frac{n^2+n}{2} ¦ n(n+1)/2", ""),
    "2n+1": ("1+2n", "2n-1"),
    r"\arctan 10": (r"\tan^{-1} 10 ¦ \arctan(10)", ""),
    r"\frac{2\sqrt{3}}{3}": (r"\frac{2}{\sqrt3}", ""),
    "e^{-x}": (r"\frac{1}{e^x}", ""),
    r"\frac{1}{3} e^{3x} + C": (r"\frac{e^{3x}}{3}+C", ""),
    "y=Ce^{x}": ("y=Ce^x ¦ Ce^x", ""),
    "2, 3, 5, 7": ("2,3,5,7", ""),
    "(1,1), (2,2)": ("(2,2),(1,1)", "(1,1) ¦ (1,2),(2,1)"),
    r"7, 8 \text{ or } 9": ("7,8,9", ""),
    "0.25": (r"1/4 ¦ 25\%", ""),
    "1/3": ("", r"0.33 ¦ 33\%"),
    r"5 \mathrm{~cm}": ("5 ¦ 5 cm", ""),
    r"2.6 \mathrm{~kg}": ("2.6 ¦ 2600 g", ""),
    r"15 \text{ minutes}": (r"15 ¦ 0.25 hours ¦ \frac14\text{ hour}", ""),
    "2:3": (r"2:3 ¦ 4:6 ¦ 2/3 ¦ 2 \text{ to } 3", "3:2 ¦ 2"),
    r"\text{odd}": ("odd", "even ¦ not odd"),
    r"\text{Yes}": ("", "no ¦ not yes"),
    r"\text{Tuesday}": ("Tuesday", ""),
    r"1 \text{ hour } 20 \text{ minutes}": ("80 minutes ¦ 1 hour 20 minutes ¦ 1 hr 20 min", ""),
    "n^2 - n + 2": ("2-n+n^2", ""),
    r"\left\lfloor \frac{n}{2} \right\rfloor": (r"\lfloor n/2\rfloor", ""),
    "(a+b)^3": ("a^3+3a^2b+3ab^2+b^3", ""),
    "1, -2, 3": ("-2,1,3", ""),
    r"6\pi \text{ cm}": (r"6\pi ¦ 6\pi\text{ cm}", ""),
    "-1<x<3": ("(-1,3)", ""),
    "a>2": (r"(2,\infty) ¦ a\in(2,+\infty)", ""),
    r"$\frac{1}{2}$": ("1/2", ""),
    "$x>1$": ("x>1", ""),
    "11": (r"11 ¦ 11 \text{ solutions} ¦ 11\text{ integers}", ""),
    "24": (
        (
            r"24\text{ ways} ¦ 24 \text{ possible arrangements} ¦ 24\text{ different numbers} ¦ 24\text{ cm}^2 ¦ "
            r"24 \text{ sq units} ¦ 24\text{ minutes} ¦ 24\%"
        ),
        (
            r"24\text{ or fewer} ¦ 24\text{ modulo }30 ¦ 24\text{ to }1 ¦ 24\text{ in base }7 ¦ "
            r"24\text{ per cent of 50} ¦ 24\text{ thousandths} ¦ 24 \text{ tens} ¦ 24\text{ dozens of eggs} ¦ "
            r"24\text{ times } x ¦ 24\text{ raised to 2} ¦ 24\text{ inverse} ¦ 24\text{ (mod 25)} ¦ "
            r"24 \text{ unless } x ¦ 24\text{ seems wrong} ¦ 24\text{ isn't it} ¦ 24\text{ can't be} ¦ "
            r"24\text{ plus } 1 ¦ 24\text{ and } 25 ¦ 24\text{ million}"
        ),
    ),
    "3 boys": ("", "3 girls ¦ 4 boys"),
    "5 red marbles": ("5 ¦ 5 marbles ¦ 5 red marbles", "5 blue pens"),
    "$4.50 per hour": ("4.50 ¦ $4.5/hour", ""),
    "20 miles per hour": ("20 mph ¦ 20 ¦ 20 miles/hour", "20 km/h ¦ 20 miles per minute"),
    "6 square feet": (r"6 ¦ 6\text{ ft}^2 ¦ 6 sq ft", "6 feet ¦ 6 cubic feet"),
    "ABCD": ("A,B,C,D ¦ ABCD", ""),
    "BC": ("B,C ¦ B, C ¦ B and C", "B ¦ C ¦ ABC ¦ B or D"),
    "ACD": (r"\text{A, C, D}", ""),
    "②③": ("②③ ¦ ②, ③", ""),
    "①②③": ("", "①② ¦ ②③"),
    r"x\leq 2": (r"x≤2 ¦ (-\infty,2]", ""),
    r"a\geqslant 1": (r"[1,+\infty) ¦ a\ge1", ""),
    r"\left[ 1, +\infty \right)": (r"[1,\infty)", ""),
    r"\{x|x>1\}": (r"(1,\infty) ¦ \{x\mid x>1\} ¦ x>1", ""),
    r"\{x\mid 1<x<2\}": ("(1,2)", ""),
    "-2或3": (r"-2,3 ¦ -2 \text{ or } 3 ¦ 3或-2", "3 ¦ -2"),
    "3或4": ("", "3"),
    "x=1或x=2": ("1,2 ¦ x=1,x=2 ¦ 1或2", ""),
    r"2\sqrt{2}厘米": (r"2\sqrt2 ¦ 2\sqrt{2}\text{ cm}", ""),
    "60°": (r"60 ¦ 60^\circ ¦ 60\text{ degrees}", ""),
    r"120^{\circ}": ("120°", ""),
    r"\dfrac{\sqrt{3}}{2}": (r"\frac{\sqrt3}{2}", ""),
    "第二象限": ("第二象限", "第三象限"),
    "15种": ("15", ""),
    "y=x+1": ("x-y+1=0", ""),
    r"\frac{x^2}{4}+\frac{y^2}{3}=1": ("3x^2+4y^2=12", ""),
    "增函数": ("增函数", ""),
    "8π": (r"8\pi", ""),
    "(2，3)": ("(2,3)", ""),
    "１２": ("12", ""),
    "不存在": ("不存在", ""),
    "-1≤x<2": ("[-1,2)", ""),
    "a_{n}=2^{n}": ("2^n ¦ a_n=2^n", ""),
    r"S_{n}=\frac{n(n+1)}{2}": (r"\frac{n^2+n}{2}", ""),
    "C_{5}^{2}": ("10", ""),
    "A_{4}^{4}": ("24", ""),
    "-3i": ("-3i", ""),
    "|z|=5": ("5", ""),
    r"\cos A=\frac{1}{3}": ("1/3", ""),
    r"AB=2\sqrt{3}": (r"2\sqrt3", ""),
    r"\angle A=30^{\circ}": (r"30^\circ ¦ 30", ""),
    r"\vec{a}\cdot\vec{b}=3": ("3", ""),
    r"S_{\triangle ABC}=6": ("6", ""),
    "m=1": ("1", ""),
    "e^2-1": ("-1+e^2", ""),
    r"\lg 2": (r"\log_{10} 2", ""),
    r"2k\pi+\frac{\pi}{3}(k\in Z)": (r"\frac{\pi}{3}+2k\pi, k\in\mathbb{Z}", ""),
    r"[k\pi-\frac{\pi}{3},k\pi+\frac{\pi}{6}](k\in Z)": (
        r"[k\pi-\frac{\pi}{3},k\pi+\frac{\pi}{6}], k\in\mathbb{Z}",
        "",
    ),
    "5 hours": ("", "5 cars ¦ 5 days"),
    "3 hours": ("180 minutes ¦ 3 ¦ 3 hrs", ""),
    "16 square meters": ("", "16 meters ¦ 16 cubic meters ¦ 16 apples"),
    "10 students": ("10 ¦ 10 people ¦ 10 students", ""),
    r"\ln|x+1|+C": ("", r"\ln(x+1)+C"),
    r"\ln|\cos x|": ("", r"\ln\cos x ¦ \ln|\sin x|"),
    r"-\ln|\cos x|+C": (r"\ln|\sec x|+C", ""),
    r"\ln\left|\frac{x-1}{x+1}\right|": (r"\ln|x-1|-\ln|x+1|", ""),
    "1e-200": ("10^{-200}", ""),
    "1.5e-145": ("", "1.6e-145"),
    r"\frac{1}{10^{160}}": ("", r"\frac{2}{10^{160}} ¦ 0"),
    r"\pi\cdot10^{-150}": ("", r"3\cdot10^{-150} ¦ 2\pi\cdot10^{-150}"),
    "(0,1e-150)": ("", "(0,2e-150)"),
    "1e-150+1e-150 i": ("", "1e-150+2e-150 i"),
    "x=1e-150": ("", "x=2e-150"),
    "1e-150:1": ("", "2e-150:1"),
    "1e-150 m": ("", "2e-150 m"),
    r"1e-150\%": ("", r"2e-150\%"),
    "x>5": ("", r"x>2+3 ¦ x>\sqrt{25} ¦ x>\frac{20}{2}-5 ¦ x>10-5 ¦ x>5\cdot1"),
    "[0,4]": ("", r"[0,2^2] ¦ [0,2+2] ¦ [0,\sqrt{16}] ¦ [1-1,4] ¦ [0,4!/6]"),
    "(3,4)": ("", r"(1+2,4) ¦ (3,2^2) ¦ (\sqrt9,4) ¦ (3, 8/2+0)"),
    "5:7": ("", r"(2+3):7 ¦ 5:(4+3) ¦ \sqrt{25}:7"),
    "1+2i": (r"2i+1 ¦ \frac{2+4i}{2} ¦ 1+2\mathrm{i}", r"(1+i)+i ¦ 2-1+2i ¦ 1+(1+1)i ¦ 3i-i+1 ¦ \frac{(1+2i)^2}{1+2i}"),
    "-3": ("", "2-5 ¦ -(1+2)"),
    "x=4,y=5": ("", "x=2+2,y=5 ¦ (4,2+3)"),
    r"\{2,4\}": ("", r"\{2,2+2\} ¦ \{2,2^2\} ¦ \{1+1,4\}"),
    "25%": ("", "20%+5% ¦ (20+5)%"),
    r"2\pmod{7}": ("", r"1+1\pmod7"),
    "y=3x+5": ("y=3x+5", ""),
    r"x\in\{1,2\}": ("", r"x\in\{1,1+1\}"),
    r"(-\infty,-2]\cup[2,\infty)": ("", r"(-\infty,-1-1]\cup[2,\infty) ¦ (-\infty,-\sqrt4]\cup[\sqrt4,\infty)"),
    "1/2:1/3": ("3:2", ""),
    r"\begin{bmatrix}4\\6\end{bmatrix}": (
        "",
        r"\begin{bmatrix}2+2\\6\end{bmatrix} ¦ \begin{bmatrix}2^2\\6\end{bmatrix}",
    ),
    r"-1\le x\le 3": ("", r"1-2\le x\le 3"),
    "x=2 or x=3": ("", "x=1+1 or x=3"),
    r"\pm3": ("", r"\pm(1+2) ¦ \pm\sqrt9"),
    "6": ("", r"\boxed{2\cdot3}"),
    "Answer: 7": ("7", ""),
    "ln(x)+C": (r"\ln x+C", ""),
    "C_8^2": ("28", ""),
    "P_5^3": ("60", ""),
    "II": ("II", ""),
    "III": ("III", ""),
    "IV": ("IV", ""),
    r"\le 3": (r"x\le3", ""),
    "≥5": (r"\geq 5", ""),
    "<7": ("x<7", ""),
    r"\lim_{n\to\infty}a_n=\frac12": (r"\frac12", ""),
    "对": ("对", ""),
    "偶函数": ("偶函数", ""),
    "5分钟": ("5", ""),
    "8人": ("8", ""),
    "100元": ("100", ""),
    "6cm": ("6", ""),
    "6 cm": ("6cm", ""),
    "①②③④": ("①②③④", ""),
    "②": ("②", ""),
    "A and C": ("A, C", ""),
    "A、B": ("AB", ""),
    "(A)": ("A", ""),
    "A.": ("A", ""),
    "no real solution": (r"\emptyset", ""),
    "None": ("none", ""),
    "infinitely many solutions": ("infinitely many", ""),
    "two": ("2", ""),
    "one-third": ("1/3", ""),
    "half": ("1/2", ""),
    "twelve": ("12", ""),
    "1 h 30 min": ("90 min", ""),
    r"\$3.50": (r"350\text{ cents}", ""),
    "50 cents": ("$0.50", ""),
    "2.5 kg": ("2500 g", ""),
    "1 day": ("24 hours", ""),
    r"\sin\theta=\frac{3}{5}": (r"\frac35", ""),
    r"\cos\angle ABC=\frac12": (r"\frac12", ""),
    r"\tan(\alpha+\beta)=1": ("1", ""),
    r"\sin^2\alpha=\frac14": (r"\frac14", ""),
    r"|\vec{a}+\vec{b}|=3": ("3", ""),
    "|PF_1|=4": ("4", ""),
    "|OA|=2": ("2", ""),
    r"S_{\triangle ABC}=3": ("3", ""),
    "S=12": ("12", ""),
    "a_5=9": ("9", ""),
    "f(-1)=2": ("2", ""),
    r"\angle AOB=120^\circ": ("120", ""),
    r"\overrightarrow{AB}=(1,2)": ("(1,2)", ""),
    "z=1+i": ("1+i", ""),
    r"\bar{z}=1-i": ("1-i", ""),
    r"P(X=2)=\frac{1}{4}": (r"\frac14", ""),
    "E(X)=3": ("3", ""),
    "D(X)=2": ("2", ""),
    r"\log_2 x=3": (r"\log_2 x=3", ""),
    r"e=\frac{\sqrt5}{2}": (r"\frac{\sqrt5}{2}", ""),
    "k=2或k=-2": (r"\pm2", ""),
    "1，2": ("1,2", ""),
    "{1，2}": (r"\{1,2\}", ""),
    "(0,+∞)": (r"(0,\infty)", ""),
    "x∈R": (r"\mathbb{R}", ""),
    "R": ("R", ""),
    "∅": (r"\emptyset", ""),
    "无解": (r"\text{no solution}", ""),
    "π": (r"\pi", ""),
    "√3": (r"\sqrt3", ""),
    "2√3/3": (r"\frac{2\sqrt3}{3}", ""),
    "-√2": (r"-\sqrt2", ""),
    "3π/4": (r"\frac{3\pi}{4}", ""),
    "x²+y²=4": ("x^2+y^2=4", ""),
    "½": ("1/2", ""),
    "45°": ("45", ""),
    "π/6": (r"\frac{\pi}{6}", ""),
    "10%": ("0.1", ""),
    "1:2": (r"\frac12", ""),
    "9:30 am": ("9:30", ""),
    "2^n-1": ("2^n-1", ""),
    "n!": ("n!", ""),
    r"\frac{1}{n}": ("1/n", ""),
    "(n+1)!-1": ("(n+1)!-1", ""),
    "3x+2": ("2+3x", ""),
    "at least 3": ("at least 3", ""),
    "about 5": ("about 5", ""),
    "more than 10": ("more than 10", ""),
    "not possible": ("not possible", ""),
    "5-10": ("5-10", ""),
    "Tuesday": ("tuesday", ""),
    "10 a.m.": ("10:00 a.m.", ""),
    "2023": ("2023", ""),
    "-0": ("0", ""),
    "1e5": ("100000", ""),
    "$1.2 million": ("1200000", ""),
    "(2,3) and (4,5)": ("(4,5),(2,3)", ""),
    r"x=\frac{-1\pm\sqrt5}{2}": (r"\frac{-1\pm\sqrt5}{2}", ""),
    r"16\text{ ordered pairs}": ("16", ""),
    "[16]": ("16", ""),
    "['16']": ("16", ""),
    "['1/2']": (r"\frac12", ""),
    "$16$": ("16", ""),
    r"\(16\)": ("16", ""),
    r"\boxed{16}": ("16", ""),
    "**16**": ("16", ""),
    "16.": ("16", ""),
    "x = 16.": ("16", ""),
    "(B) 16": ("B", ""),
    "True": ("true", ""),
    "p=5, q=7": ("p=5,q=7 ¦ 5,7", ""),
    "a=1,b=2,c=3": ("(1,2,3)", ""),
}
"""In a box, for `math`."""

RESPONSES: Mapping[str, tuple[str, str]] = {
    "16": (
        (
            r"The answer is not 15 but \boxed{16}. ¦ It is not $15$. It is $\boxed{16}$. ¦ "
            r"I made a mistake. The answer is \boxed{16}. ¦ Wait, that is wrong. \boxed{16} ¦ "
            r"The answer is 16, not 15. ¦ \boxed{16} (not 15). ¦ \boxed{16}, not 15 ¦ \boxed{16} is the answer. ¦ "
            r"\boxed{16} is correct. ¦ $\boxed{16}$ is correct. Not 15. ¦ \boxed{16}. This is not a coincidence. ¦ "
            r"The answer is \boxed{16}. I checked, and there is no mistake. ¦ "
            r"So \boxed{16}. Note that 17 is wrong. ¦ It is not hard to see that the answer is \boxed{16}. ¦ "
            r"It is not 15. The answer is \boxed{16}. ¦ It is not hard to see that the answer is 16. ¦ "
            r"Since 15 is not a square, the answer is \boxed{16}. ¦ "
            r"Hence \boxed{16}, and not 12 as one might think. ¦ \boxed{16}. But note that order does not matter. ¦ "
            r"Why not \boxed{16}? It is right. \boxed{16} ¦ If it were not prime we would have 17; \boxed{16}. ¦ "
            r"The number is 16. This is not the same as 15. ¦ \boxed{16} is not prime, as required. ¦ "
            r"\boxed{16}, which is not divisible by 3. ¦ Not all are even, so the answer is 16. ¦ "
            r"Thus there are 16 ways. ¦ \boxed{16} cannot be simplified further. ¦ "
            r"The answer is \boxed{16}, since 15 is incorrect. ¦ "
            r"The answer is $\boxed{16}$. If you made a mistake, check step 2. ¦ "
            r"\boxed{16} (the other root is rejected) ¦ \boxed{16} is not 15 ¦ "
            r"So at least 15 are needed, and the answer is \boxed{16}. ¦ "
            r"The maximum is at most 20; it is \boxed{16}. ¦ There are about 20, exactly $\boxed{16}$. ¦ "
            r"\boxed{16} ¦ $16$ ¦ Therefore the answer is $16$. ¦ Answer: 16 ¦ The minimum value is $\boxed{16}$. ¦ "
            r"at $x=3$ the maximum is \boxed{16} ¦ The least number is 16. ¦ "
            r"Case 1: 15. Case 2: 17. The mean is \boxed{16}. ¦ $\boxed{16}$ ways ¦ \boxed{16} cm ¦ "
            r"\boxed{16}\text{ cm} ¦ The answer is: $\boxed{16}$. ¦ \[\boxed{16}\] ¦ \boxed{ 16 } ¦ \boxed 16 ¦ "
            r"\boxed{\color{red}16} ¦ \boxed{\text{The answer is }16} ¦ \boxed{\text{sixteen}} ¦ "
            r"The answer is sixteen. ¦ \boxed{\mathbf{16}} ¦ \boxed{16.} ¦ \boxed{\;16\;} ¦ \boxed{{16}} ¦ "
            r"\boxed{\displaystyle 16} ¦ \boxed{\color{blue}{16}} ¦ \boxed{\textcolor{red}{16}} ¦ "
            r"\color{red}{\boxed{16}} ¦ \boxed{n=16} ¦ \boxed{\bf 16} ¦ \boxed{\large 16} ¦ \boxed{\huge{16}} ¦ "
            r"\boxed{\underline{16}} ¦ \boxed{\text{Answer: } 16} ¦ \boxed{\text{Answer: 16}} ¦ "
            r"\boxed{\text{answer is } 16} ¦ \boxed{\text{Total} = 16} ¦ \boxed{\text{Area}=16} ¦ \boxed{16 \quad} ¦ "
            r"\boxed{$16$} ¦ \boxed{\(16\)} ¦ \boxed{16\,} ¦ $\boxed{16}$$ ¦ **\boxed{16}** ¦ **16** ¦ \fbox{16} ¦ "
            r"\framebox{16} ¦ \boxed {16} ¦ \boxed{\textbf{16}} ¦ \boxed{16}\) ¦ \boxed{16}$. ¦ "
            r"The answer is `16`. ¦ \boxed{\boldsymbol{16}} ¦ \boxed{\mathrm{16}} ¦ \boxed{\rm 16} ¦ "
            r"\boxed{ \$16 } ¦ \boxed{+16} ¦ Final answer: 16 apples ¦ \boxed{\text{There are } 16 \text{ ways}} ¦ "
            r"\boxed{\text{16 ways}} ¦ \boxed{{\color{red}{16}}} ¦ {\color{blue}\boxed{16}} ¦ "
            r"\boxed{\text{The final answer is: } 16} ¦ $\boxed 16$. ¦ \boxed{x=16} ¦ sixteen ¦ Sixteen. ¦ "
            r"\boxed{16\text{ (sixteen)}} ¦ The answer is **sixteen**. ¦ 答案是16 ¦ 答案：16个 ¦ "
            "The answer is 16 (sixteen)."
        ),
        (
            r"not \boxed{16} ¦ \boxed{16} is incorrect ¦ The answer is not 16 ¦ 16 is wrong. ¦ "
            r"The answer is not \boxed{16}. ¦ It is $16$. No, that is wrong. ¦ $\boxed{16}$ is wrong. ¦ "
            r"So the answer is \boxed{16}. Wait, I made a mistake. ¦ \boxed{16}. I made a mistake. ¦ "
            r"\boxed{16} is not the answer. ¦ \boxed{16} is not correct. ¦ The answer isn't $16$. ¦ "
            r"The answer cannot be $\boxed{16}$. ¦ It can't be $16$ ¦ It is not $16$. ¦ \boxed{16} would be wrong. ¦ "
            r"The answer is anything but \boxed{16}. ¦ The answer is 16? No. ¦ \boxed{16} is false. ¦ "
            "#### 16 is wrong ¦ <answer>not 16</answer> ¦ <answer>16 is wrong</answer> ¦ Answer: not 16 ¦ "
            r"The final answer is $\boxed{16}$. Actually, that's not right. ¦ \boxed{16} ... hmm, that's wrong ¦ "
            r"The wrong answer is \boxed{16} ¦ A common mistake is $16$. ¦ "
            r"An incorrect answer would be \boxed{16}. ¦ \boxed{16} was a mistake. ¦ "
            r"\boxed{16} is never the answer ¦ The answer is different from \boxed{16}. ¦ $x \neq 16$ ¦ "
            r"\boxed{\neq 16} ¦ \boxed{\text{not }16} ¦ \boxed{\text{not } 16} ¦ "
            r"\boxed{16\text{ is not the answer}} ¦ I doubt it is \boxed{16} ¦ Never \boxed{16}. ¦ "
            r"Definitely not $\boxed{16}$ ¦ rather than \boxed{16} ¦ instead of \boxed{16} ¦ \boxed{16} is not it ¦ "
            "16 is incorrect ¦ 16 is not right ¦ 16 isn't right. ¦ 16, which is wrong. ¦ 16 was wrong ¦ "
            "It is 16. That is wrong. ¦ The answer is 16. That is incorrect. ¦ The answer is 16. I made an error. ¦ "
            "The answer is $16$, which is incorrect. ¦ The answer should not be $16$ ¦ 答案不是16 ¦ "
            r"答案不是 \boxed{16} ¦ \boxed{16} 是错误的 ¦ \boxed{16}是错的。 ¦ 16 is too small. ¦ "
            r"16 is not possible ¦ \boxed{16} is too large ¦ at least 16 ¦ 15, maybe 16 ¦ page 16 ¦ 15 to 16 ¦ "
            r"about 16 ¦ 16 or 17 ¦ \boxed{15}, \boxed{16} ¦ \boxed{\text{at least } 16} ¦ "
            r"\boxed{\text{at most }16} ¦ The answer is at least $16$. ¦ at least \boxed{16} ¦ "
            r"It is at most $\boxed{16}$. ¦ either $15$ or $16$ ¦ maybe $16$ ¦ perhaps \boxed{16} ¦ "
            r"Perhaps \boxed{15} or \boxed{16} ¦ \boxed{15} or maybe \boxed{16} ¦ "
            r"\boxed{\text{between } 15 \text{ and } 16} ¦ \boxed{\text{more than }16} ¦ \boxed{\text{maybe }16} ¦ "
            r"\boxed{15\text{ or }16} ¦ \boxed{15\text{--}16} ¦ \boxed{15-16} ¦ see equation 16 ¦ "
            "The answer is about 16. ¦ The answer is between 15 and 16 ¦ The answer is 15 or 16. ¦ more than $16$ ¦ "
            r"$> 16$ ¦ \boxed{>16} ¦ \boxed{x>16} ¦ \boxed{\ge 16} ¦ Case 1: \boxed{15}. Case 2: \boxed{16}. ¦ "
            r"If $n$ is even, \boxed{15}; if $n$ is odd, \boxed{16}. ¦ \boxed{15} (or \boxed{16}) ¦ "
            r"\boxed{15}/\boxed{16} ¦ \boxed{15} | \boxed{16} ¦ \boxed{15} vs \boxed{16} ¦ "
            r"The answer is less than \boxed{16} ¦ The answer is over \boxed{16}. ¦ <answer>15 or 16</answer> ¦ "
            "<answer>at least 16</answer> ¦ <answer>about 16</answer> ¦ I guess 16? ¦ Is it 16? ¦ "
            r"Could it be $16$? ¦ 16? ¦ Chapter 16 ¦ problem 16 ¦ Question 16 ¦ \boxed 17 ¦ "
            "The answer is seventeen. ¦ not sixteen ¦ at least sixteen ¦ sixteen or seventeen ¦ 答案至少是16 ¦ "
            "答案大约16 ¦ 16左右 ¦ 答案是15或16 ¦ Page sixteen"
        ),
    ),
    "42": ("", r"42 or 43 ¦ \boxed{42}, \boxed{43}"),
    "42, 43": (r"\boxed{42}, \boxed{43} ¦ \boxed{43} and \boxed{42}", ""),
    "73": (
        (
            r"Thus, $m+n = 64+9 = \boxed{073}$. ¦ $m+n=\boxed{73}$ ¦ The answer is $64+9=\boxed{73}$ ¦ "
            r"the requested sum is $\boxed{073}.$ ¦ Therefore $m+n=73$. ¦ "
            r"Hence the answer is $\boxed{73}$, as desired. $\blacksquare$ ¦ The requested remainder is 73. ¦ "
            "\\boxed{073} ~MathUser ¦ **Final Answer**\n\\boxed{73} ¦ "
            "\\[\n\\boxed{73}\n\\]\nNote that the answer does not depend on $a$. ¦ "
            r"Final Answer: The final answer is $\boxed{73}$. I hope it is correct. ¦ "
            r"The answer is $\boxed{73}$. Let me double-check: 64 + 9 = 73. Yes. ¦ So the answer is 73.  ¦ "
            r"\boxed{73}. This is because 72 is not possible. ¦ (The answer cannot be 72.) \boxed{73} ¦ "
            r"Not all cases work, so \boxed{73}. ¦ \boxed{73} is our answer. ¦ "
            r"It is not true that $n=5$. So $\boxed{73}$ ¦ "
            r"We found that the minimum is at least 70, and at most 80, precisely \boxed{73}. ¦ "
            r"...which gives either 72 or 73, but 72 fails, so \boxed{73}. ¦ "
            r"We need more than 72, so we need \boxed{73}. ¦ \boxed{73} (since 72 is too small) ¦ "
            r"\boxed{73} $\text{(since 72 is too small)}$ ¦ Answer: 73 (not 72) ¦ "
            "\\(\\boxed{73}\\)\n\nWait, I should double check that the answer isn't affected by rounding. It is not. ¦ "
            r"$x=\boxed{73}$ or, in words, seventy-three. ¦ We obtain $\boxed{73}$ possible values."
        ),
        (
            r"\boxed{72} or \boxed{73} ¦ \boxed{73}? I am not sure; maybe \boxed{74} ¦ "
            r"the answer is $\boxed{73}$ or more ¦ The answer is not $73$ ¦ "
            r"\boxed{73}. Wait, that's wrong. \boxed{74} ¦ \boxed{73}. That's incorrect. ¦ "
            r"I made an error above. \boxed{74} ¦ It can't be \boxed{73} ¦ \boxed{73} is wrong; it should be 74. ¦ "
            r"\boxed{73}\text{ is not correct} ¦ \boxed{73}, which is wrong ¦ The incorrect answer is \boxed{73} ¦ "
            r"less than \boxed{73} ¦ \boxed{x<73} ¦ \boxed{73} at most ¦ \boxed{73} or so ¦ "
            r"approximately \boxed{73} ¦ roughly $73$ ¦ $n\geq 73$ ¦ $72<n<73$ ¦ somewhere around \boxed{73} ¦ "
            r"The answer is 72 or 73 ¦ $72$ and $73$ ¦ \boxed{72, 73} ¦ "
            r"\boxed{72} if $n$ is odd and \boxed{73} otherwise ¦ \boxed{72 \text{ or } 73} ¦ "
            r"\boxed{73 \text{ (unverified guess, could be 74)}} ¦ \boxed{73\text{ or not}} ¦ "
            r"Answer: I don't know, 73? ¦ 73 is not what we want ¦ Is \boxed{73} right? ¦ \boxed{73}? No. ¦ "
            r"\boxed{\text{I guess } 73} ¦ \boxed{\text{around }73} ¦ \boxed{73\pm1} ¦ \boxed{73}^2 ¦ \boxed{73!} ¦ "
            r"\boxed{2\cdot73} ¦ \boxed{73 \text{ pairs}} ¦ \boxed{73 \text{ squared}} ¦ "
            r"\boxed{73\text{ is one candidate}} ¦ \boxed{73\text{ unless } n=1} ¦ \boxed{\lt 73} ¦ \boxed{73^{?}}"
        ),
    ),
}
"""Whole responses, for `math`."""

NUMBERS: Mapping[str, tuple[str, str]] = {
    "16": (
        (
            r"The answer is 16 ¦ 16 ¦ 16. ¦ It is 16 apples. ¦ \boxed{16} ¦ \boxed{16\text{ cm}} ¦ "
            r"\boxed{16 \text{ square units}} ¦ #### 16 ¦ #### 16 dollars ¦ #### $16 ¦ She has 16 left. ¦ "
            "So there are 16 of them. ¦ Thus, Janet makes $16 every day at the farmers' market. ¦ "
            "It is not 15. It is 16. ¦ not 15 but 16 ¦ 15 is wrong; it is 16. ¦ "
            "I made a mistake. The answer is 16. ¦ 16, not 15. ¦ The answer is 16, not 15. ¦ "
            r"The answer is not 15 but \boxed{16}. ¦ There are 16 ways to do it. ¦ "
            "The total number of pages is 16. ¦ On page 3 there are 16 words. ¦ The sum is 16 ¦ 16 is the answer. ¦ "
            "16 is correct. ¦ 16 (not 15) ¦ <answer>16</answer> ¦ <think id=1>8</think>16 ¦ "
            "<answer>16 apples</answer> ¦ The answer is **16**. ¦ = 16 ¦ x = 16 ¦ Total: 16 ¦ "
            "He needs 16 more dollars. ¦ He needs to save 16 dollars more. ¦ 15 + 1 = 16 ¦ "
            "In total, 16 students passed. ¦ He paid 16 dollars in total for the ¦ She is 16 years old. ¦ "
            r"At the end, he has 16 marbles left. ¦ \boxed{16} dollars ¦ $\boxed{16}$ is correct ¦ "
            "She needs at least 15, so she buys 16. ¦ Each of the 2 children gets 16 candies. ¦ "
            "The answer is 16, which is more than 10. ¦ It will take 16 more hours. ¦ "
            r"The difference is 16 - that is what we wanted. ¦ 16 percent ¦ \boxed{16\%} ¦ The minimum is 16. ¦ "
            "at least 3 tries: 16 ¦ The final price is $16.00. ¦ The number of pairs is 16."
        ),
        (
            r"The answer is not 16 ¦ 16 is wrong. ¦ \boxed{16} is incorrect ¦ not \boxed{16} ¦ "
            r"\boxed{16}. I made a mistake. ¦ 16 is incorrect. ¦ 16 is not the answer. ¦ 16 is not correct ¦ "
            "It isn't 16 ¦ It cannot be 16 ¦ It can't be 16. ¦ The answer is 16. That is wrong. ¦ "
            "The answer is 16. No, that is wrong. ¦ The answer is 16. I made a mistake. ¦ anything but 16 ¦ "
            "#### not 16 ¦ #### 16 is wrong ¦ <answer>not 16</answer> ¦ Answer: not 16 ¦ The answer is never 16 ¦ "
            r"\boxed{16\text{ is wrong}} ¦ \boxed{\text{not }16} ¦ \boxed{16\text{ or more}} ¦ "
            r"\boxed{16\text{ dozen}} ¦ at least 16 ¦ at most 16 ¦ 15, maybe 16 ¦ page 16 ¦ 15 to 16 ¦ about 16 ¦ "
            "16 or 17 ¦ 15 or 16 ¦ maybe 16 ¦ perhaps 16 ¦ between 15 and 16 ¦ more than 16 ¦ less than 16 ¦ "
            "over 16 ¦ approximately 16 ¦ roughly 16 ¦ up to 16 ¦ 16 or more ¦ 16 or so ¦ 16 at most ¦ 16 dozen ¦ "
            r"16 score ¦ 16 squared ¦ \boxed{\text{at least }16} ¦ \boxed{\text{about } 16} ¦ "
            r"\boxed{16}, \boxed{17} ¦ \boxed{15}, \boxed{16} ¦ \boxed{15} or \boxed{16} ¦ "
            r"\boxed{15} and \boxed{16} ¦ The answer is 15 or 16. ¦ The answer is at least 16. ¦ "
            "The answer is about 16. ¦ either 15 or 16 ¦ 15/16 ¦ step 16 ¦ Step 16 ¦ see page 16. ¦ equation 16 ¦ "
            r"Eq. (16) ¦ problem 16 ¦ 16? ¦ Is it 16? ¦ The answer is > 16 ¦ x > 16 ¦ $x \ge 16$ ¦ \boxed{x>16} ¦ "
            r"\boxed{>16} ¦ \boxed{\geq 16} ¦ \boxed{\le 16} ¦ \boxed{x \neq 16} ¦ x != 16 ¦ "
            r"\boxed{16 \text{ squared}} ¦ \boxed{16\text{ hundred}} ¦ \boxed{-16} ¦ \boxed{\pm 16} ¦ \boxed{16!} ¦ "
            r"\boxed{16 \pmod{17}} ¦ \boxed{16_7} ¦ \boxed{16x} ¦ \boxed{16\pi} ¦ \boxed{[16, 17]} ¦ "
            r"\boxed{\overline{16}} ¦ \boxed{--16} ¦ --16 ¦ 16 percent off ¦ 16 < x ¦ 16 > x ¦ no more than 16 ¦ "
            "no less than 16 ¦ not more than 16 ¦ fewer than 16 ¦ greater than 16 ¦ exceeds 16 ¦ under 16 ¦ "
            "below 16 ¦ above 16 ¦ nearly 16 ¦ almost 16 ¦ around 16 ¦ ~16 ¦ 16-ish ¦ 16+ ¦ 15-16 ¦ 15–16 ¦ "
            "a guess: 16 ¦ 16 and a half ¦ from 15 to 16 ¦ 16 cubed ¦ 16 factorial ¦ 16 halves ¦ 16 thirds ¦ "
            "16 thousand ¦ 16 point 5 ¦ 15 or 16 apples ¦ 15 apples or 16 apples ¦ either 15 apples or 16 ¦ "
            "15-16 apples ¦ 15 – 16 ¦ somewhere between 15 and 16 apples ¦ at minimum 16 ¦ 16 and above ¦ "
            "16, or 17 ¦ 16; or maybe 17 ¦ 16 (maybe 17) ¦ Is the answer 16? ¦ Should it be 16? ¦ "
            "The answer is 16? ¦ 16 is not it ¦ That is not 16 ¦ This is not 16. ¦ 16 does not work. ¦ "
            "16 doesn't work ¦ 16 can't be right ¦ it's wrong: 16 ¦ wrong: 16 ¦ Wrong answer: 16 ¦ "
            "An incorrect result is 16 ¦ The answer I got first, 16, is wrong. ¦ 16? Wrong. ¦ 16 - wrong ¦ "
            r"16 (incorrect) ¦ $\boxed{16}$ is incorrect. ¦ \boxed{16}, but that's wrong ¦ "
            r"\boxed{16}... no wait, that is wrong ¦ The answer is 16. But this is wrong. ¦ "
            "The answer is 16. Sorry, that was wrong. ¦ The answer is 16. I take that back. ¦ 16. Scratch that. ¦ "
            "16. I was wrong. ¦ I would say 16, but I am wrong. ¦ section 16 ¦ Section 16. ¦ Eq. 16 ¦ "
            "equation (16) ¦ figure 16 ¦ table 16 ¦ p. 16 ¦ pp. 15-16 ¦ chapter 16 ¦ question 16 ¦ Problem 16: ¦ "
            "16 per cent off"
        ),
    ),
    "8": ("", "<think id=1>8 ¦ <think foo='bar'>8 ¦ <reasoning>8"),
    "42": ("", r"42 or 43 ¦ \boxed{42}, \boxed{43} ¦ \boxed{43}, \boxed{42} ¦ \boxed{42} and \boxed{43}"),
    "43": ("", r"42 or 43 ¦ \boxed{42}, \boxed{43} ¦ 42 and 43"),
    "18": (
        (
            "Janet eats 3 eggs and bakes 4, so 16 - 3 - 4 = 9 eggs are left. She makes 9 * 2 = $18. ¦ "
            "She makes $18 every day at the farmers' market. ¦ The answer is $18. ¦ "
            "Therefore, Janet makes **$18** every day. ¦ #### 18\n ¦ "
            "So she makes 9*2 = <<9*2=18>>18 dollars daily. ¦ Final answer: 18 dollars per day ¦ "
            "\\[ 9 \\times 2 = \\boxed{18} \\] ¦ Thus she earns\n\n18 ¦ "
            "In the end it takes 18 more minutes than before. ¦ Tom has 18 more apples than Jerry. ¦ "
            "She needs 18 more. ¦ He will need at least 3 boxes. He buys 18. ¦ So she has 18 dollars left over f ¦ "
            "He saved 18 dollars, not counting tips. ¦ That means the total is 18, since 20-2=18. ¦ "
            "The profit is not 20; it is 18. ¦ There are 18 students in the class, of whom none is absent. ¦ "
            r"$\boxed{18}$ eggs ¦ The two pens cost 18 dollars together. ¦ It takes 18 minutes to finish ¦ "
            "The number of cats is 18. ¦ Half of 36 is 18. ¦ We get: 18 ¦ Answer: 18 ¦ answer: 18. ¦ "
            "The answer is:\n18 ¦ The final answer is \\(18\\). ¦ "
            r"The final answer is $\boxed{18}$. I hope it is correct."
        ),
        (
            "She makes less than $18. ¦ She makes at least 18 dollars ¦ 18 or 20 ¦ 17 or 18 ¦ "
            "It's between 17 and 18. ¦ I think 18 is wrong. ¦ Hmm, 18? No. ¦ 18 isn't correct. ¦ Not 18 ¦ "
            "between $17 and $18 ¦ 18 would be incorrect ¦ The answer is 18. Hmm, that's not right. ¦ 17 and 18 ¦ "
            "17/18 ¦ Either $17 or $18. ¦ 18 million ¦ $18 thousand ¦ -18 ¦ 18.5 ¦ 1.8 ¦ 180 ¦ 18^2 ¦ 18x ¦ "
            "The answer is 17 (or 18) ¦ The answer could be 18. ¦ Possibly 18 ¦ It must be more than 18 ¦ "
            "greater than or equal to 18 ¦ no fewer than 18 ¦ Under 18 ¦ The answer is not greater than 18 ¦ "
            "the answer is 18 or above ¦ 18 or below ¦ It might be 18. ¦ It may be 18 ¦ It could be 18 ¦ "
            r"I'd guess 18 ¦ \boxed{18} is the wrong answer ¦ It is definitely not 18. ¦ The answer isn't 18. ¦ "
            r"The answer is neither 17 nor 18. ¦ 18 is too large. ¦ The correct answer is not \boxed{18} ¦ "
            r"\boxed{18 \text{ or } 19} ¦ \boxed{18, 19} ¦ 18 & 19 ¦ 18 and 19 ¦ 18,19 ¦ \boxed{17 < 18} ¦ "
            r"\boxed{18 = 19} ¦ \boxed{\text{less than } 18} ¦ \boxed{\approx 18.4} ¦ see Figure 18 ¦ Theorem 18 ¦ "
            "exercise 18 ¦ 18 dozen eggs ¦ 18 squared ¦ 18 hundred ¦ 18 lakh"
        ),
    ),
    "3.14": ("about 3.14 ¦ approximately 3.14 ¦ It is roughly 3.14.", ""),
    "7": (
        (
            "7 (seven) ¦ seven (7) ¦ It took 7 hours ¦ There were 7 pages in the book. ¦ He read 7 pages. ¦ "
            "The answer is 7 pages ¦ She answered 7 questions"
        ),
        "",
    ),
}
"""Whole responses, for `number`."""
