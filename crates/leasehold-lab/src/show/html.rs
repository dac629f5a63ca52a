//! Renders stories as one self-contained page without scripts.

use std::fmt::Write;

use super::svg;
use super::words::{WARNING, escaped, heading, outcome, sign};
use crate::scene::{Half, Played};
use crate::story::Story;

const STYLE: &str = "\
:root{color-scheme:light dark}
body{margin:0 auto;padding:1rem;max-width:62rem;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.4rem}h2{font-size:1.15rem;margin:2.5rem 0 .3rem;border-top:1px solid var(--rule);padding-top:1.2rem}
nav li{margin:.15rem 0}a{color:var(--hold)}code{font-family:ui-monospace,monospace;font-size:.92em}
svg{max-width:100%;height:auto}details{margin:.6rem 0}summary{cursor:pointer;color:var(--faint)}
.bad{color:var(--bad)}.good{color:var(--good)}.faint{color:var(--faint)}
@media print{details{display:none}section{break-inside:avoid}}
";

/// Returns the page of the played stories.
pub fn page(all: &[(&Story, Played)]) -> String {
    let mut body = String::from("<h1>How locks fail</h1>\n");
    body.push_str(
        "<p>Each story was played twice on a real server: once with a common recipe and once \
         with leasehold. <b class=\"bad\">The recipes are broken on purpose: do not copy \
         them.</b></p>\n<nav aria-label=\"Stories\"><ul>\n",
    );
    for (story, _) in all {
        let (name, line) = (escaped(story.name), escaped(story.line));
        let _ = writeln!(body, "<li><a href=\"#{name}\">{name}</a>: {line}</li>");
    }
    body.push_str("</ul></nav>\n");
    for (story, played) in all {
        body.push_str(&section(story, played));
    }
    format!(
        "<!DOCTYPE html>\n<html lang=\"en\" class=\"lab\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src \
         'unsafe-inline'\">\n<meta name=\"viewport\" content=\"width=device-width, \
         initial-scale=1\">\n<meta name=\"color-scheme\" content=\"light dark\">\n\
         <title>How locks fail</title>\n<style>\n{}{STYLE}</style>\n</head>\n<body>\n{body}</body>\n\
         </html>\n",
        svg::STYLE
    )
}

fn section(story: &Story, played: &Played) -> String {
    let (name, line) = (escaped(story.name), escaped(story.line));
    let server = story.server.name();
    let mut text = format!(
        "<section id=\"{name}\">\n<h2>{name}: {line}</h2>\n<p class=\"faint\">On {server}: \
         <code>leasehold demo {name}</code></p>\n"
    );
    let _ = writeln!(text, "<p>{}</p>", coded(&story.telling.join(" ")));
    text.push_str(&svg::within(story, played));
    text.push_str("<details><summary>Steps as text</summary>\n");
    for half in [&played.naive, &played.ours] {
        text.push_str(&steps(half));
    }
    text.push_str("</details>\n</section>\n");
    text
}

fn steps(half: &Half) -> String {
    let mut text = format!("<h3>{}</h3>\n", escaped(&heading(half)));
    if half.is_naive {
        let _ = writeln!(text, "<p class=\"bad\">{WARNING}</p>");
    }
    text.push_str("<ol>\n");
    for step in &half.steps {
        let name = half.lanes[step.lane].name;
        let label = format!("{}{name}: {}", sign(step.mark), step.says);
        let _ = writeln!(text, "<li>{}</li>", escaped(&label));
    }
    let class = if half.is_kept { "good" } else { "bad" };
    let verdict = escaped(&half.verdict);
    let _ = writeln!(text, "</ol>\n<p class=\"{class}\">{} {verdict}</p>", outcome(half));
    text
}

/// Converts text with code between backquotes to HTML.
fn coded(text: &str) -> String {
    let parts = text.split('`').enumerate();
    let part = |(at, part)| match at % 2 {
        0 => escaped(part),
        _ => format!("<code>{}</code>", escaped(part)),
    };
    parts.map(part).collect()
}
