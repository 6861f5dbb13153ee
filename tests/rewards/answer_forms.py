"""Answers in the forms that models write them in, with the score that each deserves.

An entry is (response, truth, score). The scores were written down from the mathematics and from what Math-Verify's
README promises (boxed before plain, last before first, sets without order, tuples and intervals with it, percentages
equal to their fraction and to the plain number, units dropped, floats compared to 6 places). Math-Verify scores all of
FORMS so. Of those that it scores otherwise, REPAIRED has what this project's scorer gets right, above all wrong answers
that earn nothing, and QUIRKS the rest. We chose these answers: what the scorer earns is said by public_pairs.py.
"""

FORMS: list[tuple[str, str, float]] = [
    (r"\boxed{\{3, 1, 2\}}", r"\{1, 2, 3\}", 1),
    (r"\boxed{(2, 1)}", "(1, 2)", 0),
    # Neighbours of those below, which the scorer must leave alone.
    (r"\boxed{6.6\times 10^{-34}}", r"6.6\times 10^{-34}", 1),
    (r"\boxed{0.0000001}", "10^{-7}", 1),
    (r"\boxed{0.0}", "0", 1),
    (r"\boxed{42_{10}}", "42", 1),
    (r"\boxed{101010_2 = 42}", "42", 1),
    (r"\boxed{42_{8}}", "42_8", 1),
    (r"\boxed{\text{42 or anything}}", "42", 0),
    (r"\boxed{42 \text{ or 43}}", r"42 \text{ or 43}", 1),
    (r"\boxed{41 + 1 = 42}", "42", 1),
    (r"\boxed{42.3 = 42}", "42", 1),
    (r"\boxed{\frac13 = 0.33}", "0.33", 1),
    (r"\boxed{\frac{22}{7} \approx 3.14}", r"\frac{22}{7}", 1),
    (r"\boxed{x=2,y=1}", "(1,2)", 0),
    (r"\boxed{w=3,l=2}", "(3,2)", 1),
    (r"\boxed{y=2,x=1}", "x=1,y=2", 1),
    (r"\boxed{\frac{2x}{10^{30}}}", r"\frac{x}{10^{30}}", 0),
    (r"\boxed{5\,\mathrm{m}}", "5", 1),
    (r"\boxed{1\,234\,568}", "1234567", 0),
    # emphasis, products and powers
    ("Final Answer: **73**", "73", 1),
    ("Thus, the count is **73**.", "73", 1),
    ("**Answer: 12**", "12", 1),
    ("**Final Answer:\n12**", "12", 1),
    ("**Answer**: **$12$**", "12", 1),
    ("**x = 3**", "3", 1),
    ("**12 cm**, as asked", "12", 1),
    ("The answer is 2**3", "8", 1),
    ("The answer is 2 *3 + 4* 5", "26", 1),
    ("The answer is 2 **3** 4", "2^{81}", 1),
    ("The answer is $x *y* z$", "xyz", 1),
    (r"\boxed{a*b*c}", "abc", 1),
    (r"\boxed{x_1 * y_2 * z_{3}}", "x_1y_2z_3", 1),
    # one value, and several where the truth has them
    ("There are 3 or 4 cases; the answer is 42.", "42", 1),
    ("Is it 41 or 42? It is 42.", "42", 1),
    ("What is 6 * 7? 42", "42", 1),
    ("Answer: 42\n\n1. Add 40 and 2", "42", 1),
    ("The answer is 42 or 6 times 7.", "42", 1),
    ("The answer is 42 to 2 decimal places.", "42", 1),
    ("For n = 5, 42.", "42", 1),
    ("The answer is 1 234 567.", "1234567", 1),
    ("The answer is 1/2, 0.5 or 50%.", r"\frac12", 1),
    ("The answer is 1/3 or about 0.333.", r"\frac13", 1),
    ("The answer is 12 months or 1 year.", "12", 1),
    (r"\boxed{42} (or 42.0)", "42", 1),
    (r"\boxed{\gcd(12, 18) = 6}", "6", 1),
    ("The answer is $1 \\frac{1}{2}$.", "1.5", 1),
    (r"\boxed{x = 1 \text{ or } x = 2}", r"x = 1 \text{ or } x = 2", 1),
    (r"\boxed{x = 1 \text{ or } 2}", "x = 1, 2", 1),
    (r"\boxed{2 \text{ or } -2}", r"\pm 2", 1),
    ("The answer is $x = 1$ or $x = 2$.", "1, 2", 1),
    (r"\boxed{10\,\text{m}\,\text{s}^{-2}}", "10", 1),
    (r"\boxed{5 \text{ h } 30 \text{ min}}", r"5 \text{ h } 30 \text{ min}", 1),
    (r"\boxed{x = \sqrt{2} \approx 1.41}", r"\sqrt{2}", 1),
    (r"\boxed{\frac{85}{2} \approx 43}", r"\frac{85}{2}", 1),
    # thinking
    (r"<think>So it is \boxed{42}", "42", 1),
    (r"\boxed{3} or \boxed{4}?</think> \boxed{42}", "42", 1),
    ("4</think>2", "42", 0),
    (r"\boxed{42</think>}", "42", 0),
    # what docs/reference/rewards.md says of several boxes, tags and code, of Math-Verify alone, too
    (r"Step 1: \boxed{3}. Final: \boxed{12}", "12", 0),
    (r"Step 1: \boxed{3}. So the final answer is \boxed{12}", "12", 1),
    ("<answer>12</answer>", "12", 0),
    ("The answer is `12`.", "12", 0),
]

# Math-Verify scores each of these the other way.
REPAIRED: list[tuple[str, str, float]] = [
    # tiny truths
    (r"\boxed{0.0}", r"6.6\times 10^{-34}", 0),
    (r"\boxed{0.0}", "10^{-7}", 0),
    (r"\boxed{\{0.0, 2\}}", r"\{10^{-7}, 2\}", 0),
    (r"\boxed{3.33 \times 10^{-5}}", r"\frac{1}{30000}", 1),
    # bases
    (r"\boxed{42_8}", "42", 0),
    # hedges
    (r"\boxed{42 \text{ or anything}}", "42", 0),
    (r"\boxed{42\mathrm{ or anything}}", "42", 0),
    # signs before the answer
    (r"\boxed{\not= 42}", "42", 0),
    # false equations
    (r"\boxed{43 = 42}", "42", 0),
    (r"\boxed{43.0 = 42}", "42", 0),
    # dots
    (r"\boxed{\{1,2,3,\ldots\}}", r"\{1,2,3\}", 0),
    (r"\boxed{\{1,2,3\}}", r"\{1,2,3,\ldots\}", 0),
    (r"\boxed{\{1, 2, 3, \dots\}}", r"\{1,2,3,\ldots\}", 1),
    # values by name
    (r"\boxed{y=1,x=2}", "(1,2)", 0),
    (r"\boxed{(y,x)=(1,2)}", "(1,2)", 0),
    (r"\boxed{x_2=1,x_1=2}", "(1,2)", 0),
    # variables, not units
    (r"\boxed{3g}", "3", 0),
    (r"\boxed{5-5m}", "5(1-m)", 1),
    # tiny rationals
    (r"\boxed{\frac{1}{101!}}", r"\frac{1}{100!}", 0),
    (r"\boxed{\{1, \frac{1}{2^{98}}\}}", r"\{1, \frac{1}{2^{99}}\}", 0),
    # numbers in what cannot be read
    (r"\boxed{x = 3k, k \in \mathbb{Z}}", "3", 0),
    # one side of a relation
    (r"\boxed{42 \approx 43}", "42", 0),
    (r"\boxed{x = 42 \approx 43}", "42", 0),
    (r"\boxed{41 \mid 42}", "42", 0),
    (r"\boxed{\frac12 \approx \frac13}", r"\frac12", 0),
    (r"\boxed{\sqrt{2} \approx 5}", r"\sqrt{2}", 0),
    # emphasis
    ("__Answer__: __12__", "12", 1),
    ("The answer is *12*.", "12", 1),
    ("_12_", "12", 1),
    ("***Answer: _12_***", "12", 1),
    ("The answer is **1/2**.", r"\frac12", 1),
    ("$**12**$", "12", 1),
    # several values
    ("The answer is 42 or 43.", "42", 0),
    ("The answer is either 42 cm or 43 cm.", "42", 0),
    ("Answer: $x = 42$ (or 43)", "42", 0),
    ("Answer: x = 42 or x = 43", "43", 0),
    ("The answer is 42. Or maybe 43.", "42", 0),
    ("The answer is 0.42 or 0.43.", "0.42", 0),
    ("The answer is 1/3 or about 0.4.", r"\frac13", 0),
    ("Final answer: 42? 43? 44?", "42", 0),
    ("I think 42? 43? 44?", "44", 0),
    ("The answer is 42, 43.", "42", 0),
    ("The answer is 42 and 43.", "42", 0),
    ("It is between 41 and 42.", "42", 0),
    ("The answer is 42–43.", "42", 0),
    ("The answer is (1, 2).", "2", 0),
    (r"\boxed{42} or 43", "42", 0),
    (r"43 or \boxed{42}", "42", 0),
    (r"\boxed{42 \text{ (or }43\text{)}}", "42", 0),
    (r"\boxed{42 \text{, maybe } 43 \text{ too}}", "42", 0),
    (r"\boxed{42 \text{ maybe 43}}", "42", 0),
    (r"\boxed{5 \text{ h } 30 \text{ min}}", "5", 0),
    # thinking
    (r"<think>It is \boxed{42}.</think>", "42", 0),
    (r"\boxed{41}</think>\boxed{43}</think>\boxed{42}", "42", 1),
    ("The answer is 42.</think> It is 42 or 43.", "42", 0),
    # empty boxes
    (r"I put it into $\boxed{}$. It is \boxed{42}", "42", 1),
    (r"\boxed{42}, which is in \boxed{ }", "42", 1),
]

# Scored wrongly, as docs/reference/rewards.md says: (response, truth, Math-Verify's score, which it does not deserve).
QUIRKS: list[tuple[str, str, float]] = [
    (r"\boxed{50\%}", "50", 0),
    (r"\boxed{5\text{ kg}}", r"5\text{ m/s}", 1),
    (r"\boxed{41 + 2 = 42}", "42", 1),
    ("The answer is 42, but it could be 43.", "42", 1),
    (r"\boxed{1 234 567}", "1234567", 0),
    (r"\boxed{42.}", "42", 0),
    (r"\boxed{pi/2}", r"\frac{\pi}{2}", 0),
]
