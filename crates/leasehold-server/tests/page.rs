//! The page at `/`, in a browser.

mod support;
#[path = "support/tab.rs"]
mod tab;

use std::path::Path;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use leasehold_server::{Access, Limits};
use serde_json::{Value, json};
use support::{Server, hash, id};
use tab::Tab;
use tempfile::TempDir;

const TOKEN: &str = "operator-token-0a4f";
const PART: &str = "part-token-77b1";
/// A lock name, a label and a reason that a page must not interpret as HTML.
const SCRIPT: &str = "<script>alert(1)</script>";
const IMAGE: &str = "<img src=x onerror=alert(2)>";

struct Page {
    server: Server,
    directory: TempDir,
}

impl Page {
    async fn start() -> Self {
        let identities = json!({"identities": [
            {
                "name": "operator",
                "token_sha256": [hash(TOKEN)],
                "prefixes": [""],
                "rights": ["hold", "inspect", "evict", "freeze"],
            },
            {
                "name": "part",
                "token_sha256": [hash(PART)],
                "prefixes": ["app/"],
                "rights": ["inspect"],
            },
        ]});
        let directory = TempDir::new().unwrap();
        let file = directory.path().join("tokens.json");
        std::fs::write(&file, identities.to_string()).unwrap();
        let access = Access::tokens(&file).unwrap();
        let server = Server::start(support::memory(), access, Limits::default()).await;
        Self { server, directory }
    }

    async fn call(&self, method: &str, path: &str, body: Value) -> support::Answer {
        let header = format!("Authorization: Bearer {TOKEN}\r\n");
        let body = if body.is_null() { String::new() } else { body.to_string() };
        self.server.with(method, path, &header, &body).await
    }

    async fn join(&self, n: u128, name: &str, label: &str) {
        let claim = json!({"name": name, "label": label, "host": "h", "pid": n, "lease_ms": 600_000,
            "waiter_lease_ms": 600_000});
        let body = json!({"id": id(n), "mode": "wait", "claim": claim});
        let answer = self.call("POST", "/v1/claims", body).await;
        assert!([201, 202].contains(&answer.status), "{answer:?}");
    }

    /// Uses the page in a browser, on a thread that may block.
    async fn with<T: Send + 'static>(
        &self,
        width: u32,
        token: &'static str,
        use_page: impl FnOnce(&mut Tab) -> T + Send + 'static,
    ) -> T {
        /// Several browsers at once would only slow each other down.
        static ONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());
        let _one = ONE.lock().await;
        let url = format!("http://127.0.0.1:{}/", self.server.port);
        let used = tokio::task::spawn_blocking(move || {
            let mut tab = Tab::open(width, 800);
            tab.go(&url);
            tab.until("document.querySelector('#login')?.open === true");
            tab.eval("document.querySelector('#token').focus()");
            tab.type_text(token);
            tab.press("Enter");
            tab.until("document.querySelector('#connection').className === 'up'");
            tab.until("document.querySelector('#count').textContent !== ''");
            let result = use_page(&mut tab);
            assert_eq!(tab.errors(), [""; 0]);
            result
        });
        used.await.unwrap()
    }
}

/// Returns a script that is true if an element has this text.
fn shows(selector: &str, text: &str) -> String {
    format!("document.querySelector({selector:?})?.innerText.includes({text:?}) === true")
}

/// Returns a script that clicks the button of a lock, or another one with this text.
fn click(text: &str) -> String {
    format!(
        "[...document.querySelectorAll('dialog[open] button, button')]\
         .find((b) => b.textContent === {text:?} && b.checkVisibility()).click()"
    )
}

#[tokio::test(flavor = "multi_thread")]
async fn locks_queues_deadlocks_and_history_are_shown_as_text() {
    let page = Page::start().await;
    page.join(1, SCRIPT, IMAGE).await;
    page.join(2, SCRIPT, "second").await;
    page.join(3, "other", "second").await;
    page.join(2, "b", "").await;
    page.join(1, "b", "").await;
    page.with(1280, TOKEN, |tab| {
        for text in [SCRIPT, IMAGE, "other", "second (h pid 3)"] {
            tab.until(&shows("#rows", text));
        }
        assert_eq!(tab.eval("document.querySelectorAll('#rows script, #rows img').length"), 0);
        tab.eval(&click(SCRIPT));
        tab.until(&shows("#title", SCRIPT));
        tab.until(&shows("#queue", "second (h pid 2)"));
        tab.until(&shows("#chain", SCRIPT));
        tab.until(&shows("#history", IMAGE));
        assert_eq!(tab.eval("document.querySelectorAll('main script, main img').length"), 0);
        assert_eq!(tab.eval("document.scripts.length"), 1);
        assert!(tab.eval("document.cookie") == "" && tab.eval("localStorage.length") == 0);
        assert!(tab.eval("sessionStorage.length") == 1);
        let reported: Vec<String> = tab.errors();
        // The browser reports that the test has read the cookies.
        assert!(reported.iter().all(|e| e.contains("DocumentCookie")), "{reported:?}");
        // Code that was injected nevertheless must not run.
        tab.eval(
            "const s = document.createElement('script'); s.textContent = 'window.ran = 1'; \
             document.body.append(s)",
        );
        assert_eq!(tab.eval("window.ran ?? 0"), 0);
        let reported = tab.errors();
        assert!(reported.iter().any(|e| e.contains("Content Security Policy")), "{reported:?}");
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deadlock_is_shown_with_its_parties() {
    let page = Page::start().await;
    let join = async |n, pid, name: &str| {
        let claim = json!({"name": name, "host": "h", "pid": pid, "lease_ms": 600_000,
            "waiter_lease_ms": 600_000});
        let body = json!({"id": id(n), "mode": "wait", "claim": claim});
        page.call("POST", "/v1/claims", body).await;
    };
    join(1, 1, "a").await;
    join(2, 2, "b").await;
    join(3, 1, "b").await;
    join(4, 2, "a").await;
    page.with(1280, TOKEN, |tab| {
        tab.eval(&click("a"));
        tab.until(&shows("#deadlock", "h pid 1 holds a and waits for b"));
        tab.until(&shows("#deadlock", "h pid 2 holds b and waits for a"));
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_change_appears_without_a_reload() {
    let page = Page::start().await;
    page.join(1, "first", "").await;
    let url = format!("http://127.0.0.1:{}", page.server.port);
    let claim = json!({"name": "later", "label": "new", "lease_ms": 600_000});
    let body = json!({"id": id(2), "claim": claim}).to_string();
    let took = page
        .with(1280, TOKEN, move |tab| {
            tab.until(&shows("#rows", "first"));
            tab.eval(&format!(
                "fetch({url:?} + '/v1/claims', {{method: 'POST', body: {body:?}, headers: \
                 {{'Content-Type': 'application/json', Authorization: 'Bearer {TOKEN}'}}}})\
                 .then((r) => r.status)"
            ));
            tab.until(&shows("#rows", "later"))
        })
        .await;
    assert!(took < Duration::from_secs(10), "the change appeared after {took:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_evicts_freezes_and_unfreezes_after_confirmation() {
    let page = Page::start().await;
    page.join(1, "a/b?c", "one").await;
    page.with(1280, TOKEN, |tab| {
        tab.eval(&click("a/b?c"));
        tab.until(&shows("#queue", "one"));
        tab.eval(&click("Evict"));
        tab.until(&shows("#confirm", "Evict one (h pid 1)?"));
        // Enter cancels, because the focus is on that button.
        tab.press("Enter");
        tab.until("!document.querySelector('#confirm').open");
        tab.until(&shows("#queue", "one"));
        tab.eval(&click("Evict"));
        tab.eval("document.querySelector('#do').click()");
        tab.until(&shows("#message", "Evicted 1 claim from a/b?c."));
        tab.until(&shows("#facts", "Not in use."));
        tab.until(&shows("#history", "evicted"));

        tab.eval(&click("Freeze"));
        tab.type_text("<b>work</b>");
        tab.press("Enter");
        tab.until(&shows("#facts", "frozen: <b>work</b>"));
        tab.until(&shows("#rows", "frozen: <b>work</b>"));
        tab.eval(&click("Unfreeze"));
        tab.eval("document.querySelector('#do').click()");
        tab.until(&shows("#message", "Unfroze a/b?c."));
    })
    .await;
    let lock = page.call("GET", "/v1/locks/a%2Fb%3Fc", Value::Null).await.is(200).json();
    assert_eq!(lock["lock"], Value::Null);
}

#[tokio::test(flavor = "multi_thread")]
async fn page_is_usable_by_keyboard_alone() {
    let page = Page::start().await;
    for (n, name) in ["a", "b", "bc", "d"].into_iter().enumerate() {
        page.join(n as u128 + 1, name, "").await;
    }
    page.with(1280, TOKEN, |tab| {
        tab.press("j");
        tab.until("document.activeElement.textContent === 'a'");
        tab.press("ArrowDown");
        tab.press("j");
        tab.press("k");
        tab.until("document.activeElement.textContent === 'b'");
        tab.press("Enter");
        tab.until(&shows("#title", "b"));
        tab.press("Escape");
        tab.until("document.querySelector('#detail').hidden");
        tab.until("document.activeElement.textContent === 'b'");
        tab.press("/");
        tab.until("document.activeElement.id === 'filter'");
        tab.type_text("b");
        tab.until(&shows("#count", "2 of 4 locks"));
        tab.press("Enter");
        tab.press("j");
        tab.press("Enter");
        tab.until(&shows("#title", "bc"));
    })
    .await;
}

impl Page {
    /// Adds a lock with a holder and waiters, a frozen lock, and a deadlock.
    async fn fill(&self) {
        self.join(1, "orders/42", "billing").await;
        self.join(2, "orders/42", "shipping").await;
        self.join(3, "orders/42", "returns").await;
        self.join(1, "stock", "billing").await;
        self.join(2, "mail", "shipping").await;
        self.join(1, "mail", "billing").await;
        let week = json!({"for_ms": 604_800_000, "reason": "migration"});
        self.call("POST", "/v1/locks/reports/freeze", week).await.is(204);
    }
}

/// Shows the filled page in each of its forms, and calls `look` with the name of the form.
async fn look_at_each_form(look: impl Fn(&mut Tab, &str) + Clone + Send + 'static) {
    let page = Page::start().await;
    page.fill().await;
    for (form, width, is_dark) in
        [("1280", 1280, false), ("1280-dark", 1280, true), ("360", 360, false)]
    {
        let look = look.clone();
        page.with(width, TOKEN, move |tab| {
            if is_dark {
                tab.dark();
            }
            look(tab, form);
        })
        .await;
    }
}

/// Shows each part of the page, and calls `look` with its name.
fn look_at_each_part(tab: &mut Tab, mut look: impl FnMut(&mut Tab, &str)) {
    tab.until(&shows("#rows", "frozen: migration"));
    look(tab, "locks");
    tab.eval(&click("orders/42"));
    tab.until(&shows("#queue", "returns (h pid 3)"));
    tab.until(&shows("#deadlock", "h pid 2 holds mail and waits for orders/42"));
    look(tab, "lock");
    tab.eval(&click("Freeze"));
    tab.until("document.querySelector('#confirm').open");
    look(tab, "freeze");
    tab.press("Escape");
    tab.until("!document.querySelector('#confirm').open");
}

/// Axe checks contrasts, labels, roles and the order of headings, among others.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "runs with ./test.sh --all"]
async fn axe_finds_no_accessibility_problems() {
    look_at_each_form(|tab, form| {
        look_at_each_part(tab, |tab, part| {
            assert_eq!(tab.accessibility_problems(), json!([]), "{part}-{form}");
        });
        // Axe must report a problem that is there.
        tab.eval("document.documentElement.removeAttribute('lang')");
        assert_eq!(tab.accessibility_problems()[0]["id"], "html-has-lang");
    })
    .await;
}

/// With `UPDATE_PICTURES=1`, the test writes the pictures instead.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "runs with ./test.sh --all"]
async fn page_looks_like_its_pictures() {
    look_at_each_form(|tab, form| {
        // Pictures do not depend on how long the test has been running.
        tab.eval("window.duration = () => '42 s'; window.clock = () => '12:34:56 PM'");
        tab.until(&shows("#rows", "42 s"));
        let mut taken = Vec::new();
        look_at_each_part(tab, |tab, part| taken.push((part.to_owned(), tab.picture())));
        tab.go("about:blank");
        for (part, picture) in &taken {
            let name = format!("{part}-{form}.png");
            let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/pictures").join(&name);
            if std::env::var_os("UPDATE_PICTURES").is_some() {
                std::fs::write(&file, STANDARD.decode(picture).unwrap()).unwrap();
            }
            let expected = STANDARD.encode(std::fs::read(&file).unwrap());
            let different = tab.difference(picture, &expected);
            assert!(different < 0.02, "{name}: {different} of the picture is different");
        }
        // The comparison must notice that a dialog is missing.
        assert!(tab.difference(&taken[1].1, &taken[2].1) > 0.1);
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_server_is_shown_and_the_page_reconnects() {
    let mut page = Page::start().await;
    page.join(1, "before", "").await;
    let file = page.directory.path().join("tokens.json");
    let (port, stop) = (page.server.port, page.server.stop());
    let runtime = tokio::runtime::Handle::current();
    page.with(1280, TOKEN, move |tab| {
        tab.until(&shows("#rows", "before"));
        // The streams end, and the port is closed.
        drop(stop);
        tab.until(&shows("#connection", "disconnected"));
        tab.until("!document.querySelector('#retry').hidden");
        // Another server at the same address, with no locks.
        let access = Access::tokens(&file).unwrap();
        let _next = runtime.block_on(Server::start_at(port, support::memory(), access));
        tab.until("document.querySelector('#connection').className === 'up'");
        tab.until(&shows("#empty", "No locks are in use."));
        // The browser reports each request that failed.
        tab.errors();
    })
    .await;
    tokio::time::timeout(support::PATIENCE, &mut page.server.task).await.unwrap().unwrap();
}

/// An identity with a prefix is not notified of changes, so the page polls.
#[tokio::test(flavor = "multi_thread")]
async fn an_identity_with_a_prefix_sees_its_locks_and_their_changes() {
    let page = Page::start().await;
    page.join(1, "app/a", "").await;
    page.join(2, "secret", "").await;
    let url = format!("http://127.0.0.1:{}", page.server.port);
    let claim = json!({"name": "app/later", "lease_ms": 600_000});
    let body = json!({"id": id(3), "claim": claim}).to_string();
    page.with(360, PART, move |tab| {
        tab.until(&shows("#rows", "app/a"));
        assert!(tab.eval("!document.body.innerText.includes('secret')") == true);
        tab.eval(&format!(
            "fetch({url:?} + '/v1/claims', {{method: 'POST', body: {body:?}, headers: \
             {{'Content-Type': 'application/json', Authorization: 'Bearer {TOKEN}'}}}})\
             .then((r) => r.status)"
        ));
        tab.until(&shows("#rows", "app/later"));
        assert!(tab.eval("document.documentElement.scrollWidth <= innerWidth") == true);
        tab.eval(&click("app/a"));
        tab.eval(&click("Evict all holders"));
        tab.eval("document.querySelector('#do').click()");
        tab.until(&shows("#confirm-error", "does not have the right"));
        // The browser reports the requests that were denied.
        tab.errors();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_locks_stay_usable() {
    let page = Page::start().await;
    for n in 0..10_000 {
        page.join(n + 1, &format!("lock/{n:05}"), "many").await;
    }
    page.with(1280, TOKEN, |tab| {
        tab.until(&shows("#count", "10000 locks"));
        assert!(tab.eval("document.querySelectorAll('#rows tr').length < 80") == true);
        tab.eval("document.querySelector('#scroller').scrollTop = 1e9");
        tab.until(&shows("#rows", "lock/09999"));
        let filter = "const f = document.querySelector('#filter'); f.value = 'lock/05000'; \
             const t = performance.now(); f.dispatchEvent(new Event('input')); \
             performance.now() - t";
        let ms = tab.eval(filter).as_f64().unwrap();
        assert!(ms < 3000.0, "filtering took {ms} ms");
        tab.until(&shows("#count", "1 of 10000 locks"));
    })
    .await;
}
