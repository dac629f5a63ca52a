//! Renders the run as one self-contained page.
//!
//! The page is the same for every run (`page/`), except for the data, which is in its own block
//! that no browser interprets. Names are untrusted input, so they are encoded such that nothing in
//! the block can end it or begin a tag, and the page's script inserts them only as text. The
//! report, which is readable without JavaScript, is HTML-escaped.

mod data;

use super::judged::Judged;

const TEMPLATE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
/// One program. Each part uses the parts before it.
const PROGRAM: &str = concat!(
    include_str!("page/lanes.js"),
    include_str!("page/draw.js"),
    include_str!("page/find.js"),
    include_str!("page/hands.js"),
    include_str!("page/page.js"),
);

/// Returns the page of a run.
pub(super) fn page(judged: &Judged) -> String {
    let parts = [
        ("{{style}}", STYLE.to_owned()),
        ("{{report}}", as_text(&judged.report.to_string())),
        ("{{data}}", as_data(&data::of(judged))),
        ("{{program}}", PROGRAM.to_owned()),
    ];
    let mut page = String::new();
    let mut rest = TEMPLATE;
    // The marks are replaced in the order of the template, so that inserted text is not searched
    // for marks.
    for (mark, part) in parts {
        let (before, behind) = rest.split_once(mark).unwrap_or((rest, ""));
        page.push_str(before);
        page.push_str(&part);
        rest = behind;
    }
    page + rest
}

/// Escapes text for use between tags.
fn as_text(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Escapes data for a script element. The data stays the same, without characters that could end
/// the element.
fn as_data(data: &data::Data) -> String {
    // These types consist of numbers, strings and lists, which JSON can always represent.
    let json = serde_json::to_string(data).unwrap_or_default();
    json.replace('<', "\\u003c").replace('>', "\\u003e").replace('&', "\\u0026")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::archive;

    fn page_of(history: &str) -> String {
        let (trial, history) = archive::read(history.as_bytes()).unwrap();
        page(&Judged::new(trial, history))
    }

    #[test]
    fn untrusted_text_is_escaped_in_the_page() {
        let evil = "</script><img src=x onerror=alert(1)>{{program}}<!--";
        let header = serde_json::json!({
            "format": "leasehold-history", "version": 1, "promises": ["wakeup"],
            "store": evil, "command": [evil],
            "locks": [{ "name": evil, "kind": "mutex", "capacity": 1 }],
        });
        let crash = serde_json::json!({ "event": "crashed", "what": evil });
        let asked = r#"{"event":"invoked","worker":0,"n":0,"at":1,"lock":0}"#;
        let page =
            page_of(&format!("{header}\n{asked}\n{crash}\n{{\"event\":\"end\",\"at\":2}}\n"));
        assert!(page.contains("u003cimg src=x"), "the data does not contain the name");
        assert!(page.contains("&lt;img src=x"), "the report does not contain the name");
        let own = page_of(
            "{\"format\":\"leasehold-history\",\"version\":1,\"promises\":[],\"store\":\"\",\"locks\":[]}\n\
             {\"event\":\"end\",\"at\":2}\n",
        );
        for tag in ["<script", "</script", "<img", "<!--", "onerror=alert(1)>"] {
            let times = |page: &str| page.to_lowercase().matches(tag).count();
            assert_eq!(times(&page), times(&own), "{tag}");
        }
        assert_eq!(page.matches(PROGRAM).count(), 1);
    }

    #[test]
    fn page_has_no_external_references() {
        for part in [TEMPLATE, STYLE, PROGRAM] {
            for reference in ["http:", "https:", "src=", "href=\"/", "url(", "@import", "import("] {
                assert!(!part.contains(reference), "{reference}");
            }
        }
    }
}
