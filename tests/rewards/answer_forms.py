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
]

# What docs/reference/rewards.md calls scored wrongly: (response, truth, what Math-Verify says, not what it deserves).
QUIRKS: list[tuple[str, str, float]] = [
    (r"\boxed{50\%}", "50", 0),
    (r"\boxed{5\text{ kg}}", r"5\text{ m/s}", 1),
    (r"\boxed{41 + 2 = 42}", "42", 1),
    (r"\boxed{1 234 567}", "1234567", 0),
    (r"\boxed{42.}", "42", 0),
    (r"\boxed{pi/2}", r"\frac{\pi}{2}", 0),
]
