"""What pages are made of."""

from hpclm.reporting import html


def test_text_ends_neither_an_element_nor_an_attribute():
    assert html.text("""a"b'c<d>&""") == "a&quot;b&#x27;c&lt;d&gt;&amp;"
