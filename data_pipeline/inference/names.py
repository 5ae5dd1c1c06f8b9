"""Names that people give to columns, and words that they use for positive labels."""

import re

LABEL_NAMES = ("label", "click", "clk", "clicks", "clicked", "is_click", "target", "y", "converted", "conversion",
               "is_conversion", "purchase", "purchased", "buy", "bought", "like", "liked", "response", "class",
               "rating")  # fmt: skip
POSITIVE = ("yes", "y", "true", "t", "positive", "pos", "click", "clicked", "converted", "conversion", "purchase",
            "purchased", "buy", "bought", "like", "liked", "paid", "won", "success", "accepted",
            "subscribed")  # fmt: skip
NEGATION = r"(no|not|non|un|never)[\s_-]*"
WEIGHT_NAMES = ("weight", "weights", "sample_weight", "sample_weights")

ID_NAME = re.compile(
    r"(^|_|\b)(?i:(id|uid|gid|code|zip|zipcode|type|category|cat|gender|key|hash|ip|hour|day|month)s?"
    r"|(user|item|product|movie|ad|campaign|advertiser|device|customer|shop|store|brand|city|country|region|site|app"
    r"|visitor|session|member|client|account|song|artist|book|author|video|publisher|adgroup|segment|seg)(ids?)?)$"
    r"|(?<=[a-z0-9])(Id|ID)s?$"
)
AMOUNT_NAME = re.compile(
    r"(^|_)(num|nb|n|no_of|per|count|total|sum|avg|mean|amount|spend|price|cost|since)_|(hour|day|month)s?$", re.I
)
"""Of a number of what follows, of an amount for each, or of a span of time: names of ids that may be amounts."""
TOTAL_NAME = re.compile(r"(^|_)(imps?|impressions?|exposures?|displays?|shows?)$", re.I)
"""Of the samples that a row of counts stands for."""
TIME_NAME = re.compile(r"(time|date|stamp|^ts$|_at$|^at$)", re.I)
