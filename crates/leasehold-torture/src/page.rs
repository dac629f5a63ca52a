//! The run as a page: one file, with no reference to anything elsewhere.
//!
//! The page is the same for every run (`page/`): what differs is data, in a block of its own that no
//! browser takes for anything else. Names come from outside, so in that block nothing can end it or
//! begin a tag, and the page's program puts text into the document as text only. What a reader without
//! the program sees, the report, is escaped.

mod data;

use super::judged::Judged;

const TEMPLATE: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
/// One program, each part of which uses those before.
const PROGRAM: &str = concat!(
    include_str!("page/lanes.js"),
    include_str!("page/draw.js"),
    include_str!("page/find.js"),
    include_str!("page/hands.js"),
    include_str!("page/page.js"),
);

/// The page of a run.
pub(super) fn page(judged: &Judged) -> String {
    let parts = [
        ("{{style}}", STYLE.to_owned()),
        ("{{report}}", as_text(&judged.report.to_string())),
        ("{{data}}", as_data(&data::of(judged))),
        ("{{program}}", PROGRAM.to_owned()),
    ];
    let mut page = String::new();
    let mut rest = TEMPLATE;
    // In their order in the template, so that nothing is looked for in what was put in.
    for (mark, part) in parts {
        let (before, behind) = rest.split_once(mark).unwrap_or((rest, ""));
        page.push_str(before);
        page.push_str(&part);
        rest = behind;
    }
    page + rest
}

/// Text as it stands between tags.
fn as_text(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}

/// Data as it stands in a script element: the same data, without what could end that element.
fn as_data(data: &data::Data) -> String {
    // Numbers, strings and lists of them: there is nothing in these types that JSON lacks.
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
    fn nothing_from_outside_becomes_a_tag() {
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
        assert!(page.contains("u003cimg src=x"), "the name is in the data");
        assert!(page.contains("&lt;img src=x"), "and in the report");
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
    fn the_page_refers_to_nothing_elsewhere() {
        for part in [TEMPLATE, STYLE, PROGRAM] {
            for reference in ["http:", "https:", "src=", "href=\"/", "url(", "@import", "import("] {
                assert!(!part.contains(reference), "{reference}");
            }
        }
    }
}
