//! A tab of Chromium, controlled by the Chrome DevTools Protocol.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use testbed::{Browser, DevTools};

use crate::support::PATIENCE;

/// A tab. Its calls block.
pub(crate) struct Tab {
    browser: DevTools,
    session: Option<String>,
    number: u64,
    /// Console messages, exceptions and violations of the content security policy.
    errors: Vec<String>,
}

impl Tab {
    pub(crate) fn open(width: u32, height: u32) -> Self {
        let browser = Browser::new(width, height).control();
        let mut tab = Self { browser, session: None, number: 0, errors: Vec::new() };
        let target = tab.call("Target.createTarget", json!({"url": "about:blank"}));
        let of = json!({"targetId": target["targetId"], "flatten": true});
        let session = tab.call("Target.attachToTarget", of);
        tab.session = session["sessionId"].as_str().map(str::to_owned);
        for domain in ["Page", "Runtime", "Log", "Audits"] {
            tab.call(&format!("{domain}.enable"), json!({}));
        }
        let size =
            json!({"width": width, "height": height, "deviceScaleFactor": 1, "mobile": false});
        tab.call("Emulation.setDeviceMetricsOverride", size);
        tab
    }

    fn call(&mut self, method: &str, params: Value) -> Value {
        self.number += 1;
        let mut message = json!({"id": self.number, "method": method, "params": params});
        if let Some(session) = &self.session {
            message["sessionId"] = session.as_str().into();
        }
        self.browser.send(&message.to_string());
        loop {
            let mut message: Value = serde_json::from_str(&self.browser.receive()).unwrap();
            if message["id"] == self.number {
                assert!(message.get("error").is_none(), "{method}: {message}");
                return message["result"].take();
            }
            self.note(&message);
        }
    }

    fn note(&mut self, event: &Value) {
        let method = event["method"].as_str().unwrap_or_default();
        if ![
            "Log.entryAdded",
            "Runtime.exceptionThrown",
            "Runtime.consoleAPICalled",
            "Audits.issueAdded",
        ]
        .contains(&method)
        {
            return;
        }
        let text = event["params"].to_string();
        // The first request checks whether a token is needed, so this error is expected.
        if !text.contains("status of 401") {
            self.errors.push(format!("{method}: {text}"));
        }
    }

    pub(crate) fn go(&mut self, url: &str) {
        self.call("Page.navigate", json!({"url": url}));
    }

    /// Sets the user's preference for dark pages.
    pub(crate) fn dark(&mut self) {
        let dark = json!({"name": "prefers-color-scheme", "value": "dark"});
        self.call("Emulation.setEmulatedMedia", json!({"features": [dark]}));
    }

    /// Returns a picture of the window: a PNG file in base64.
    pub(crate) fn picture(&mut self) -> String {
        let picture = self.call("Page.captureScreenshot", json!({"format": "png"}));
        picture["data"].as_str().unwrap().to_owned()
    }

    /// Returns which share of two pictures is visibly different. Each is first divided into squares
    /// of 16 pixels, so that other digits and another version of a font make no difference.
    ///
    /// The tab must show an empty page, because the policy of the real page forbids pictures.
    pub(crate) fn difference(&mut self, one: &str, other: &str) -> f64 {
        let script = format!(
            "(async () => {{
                const squares = async (base64) => {{
                    const image = new Image();
                    image.src = 'data:image/png;base64,' + base64;
                    await image.decode();
                    const canvas = document.createElement('canvas');
                    [canvas.width, canvas.height] = [image.width / 16, image.height / 16];
                    const context = canvas.getContext('2d');
                    context.imageSmoothingQuality = 'high';
                    context.drawImage(image, 0, 0, canvas.width, canvas.height);
                    return context.getImageData(0, 0, canvas.width, canvas.height).data;
                }};
                const [one, other] = [await squares({one:?}), await squares({other:?})];
                if (one.length !== other.length) return 1;
                const differs = (n) => Math.abs(one[n] - other[n]) > 24;
                let different = 0;
                for (let n = 0; n < one.length; n += 4)
                    different += differs(n) || differs(n + 1) || differs(n + 2);
                return different / (one.length / 4);
            }})()"
        );
        self.eval(&script).as_f64().unwrap()
    }

    /// Returns the problems that axe finds, with their elements.
    pub(crate) fn accessibility_problems(&mut self) -> Value {
        let axe = std::fs::read_to_string(testbed::node_module("axe-core/axe.min.js")).unwrap();
        self.eval(&format!("{axe}; 0"));
        self.eval(
            "axe.run().then((found) => found.violations.map((problem) => \
             ({id: problem.id, help: problem.help, nodes: problem.nodes.map((n) => n.html)})))",
        )
    }

    /// Returns the value of a JavaScript expression.
    pub(crate) fn eval(&mut self, script: &str) -> Value {
        let params = json!({"expression": script, "awaitPromise": true, "returnByValue": true});
        let mut result = self.call("Runtime.evaluate", params);
        assert!(result.get("exceptionDetails").is_none(), "{script}: {result}");
        result["result"]["value"].take()
    }

    /// Waits until the expression is true, and returns how long that took.
    #[track_caller]
    pub(crate) fn until(&mut self, script: &str) -> Duration {
        let started = Instant::now();
        while self.eval(script) != true {
            if started.elapsed() > PATIENCE {
                let text = self.eval("document.body.innerText");
                panic!("not true: {script}\n{text}\n{:?}", self.errors);
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        started.elapsed()
    }

    /// Presses keys: `Enter`, `Escape`, or one that types a character.
    pub(crate) fn press(&mut self, key: &str) {
        let code = match key {
            "Enter" => 13,
            "Escape" => 27,
            "ArrowDown" => 40,
            _ => 0,
        };
        let mut down = json!({"type": "keyDown", "key": key, "windowsVirtualKeyCode": code});
        match key {
            "Enter" => down["text"] = "\r".into(),
            key if key.len() == 1 => down["text"] = key.into(),
            _ => {}
        }
        self.call("Input.dispatchKeyEvent", down);
        self.call("Input.dispatchKeyEvent", json!({"type": "keyUp", "key": key}));
    }

    pub(crate) fn type_text(&mut self, text: &str) {
        self.call("Input.insertText", json!({"text": text}));
    }

    /// Returns everything that the browser has reported so far.
    pub(crate) fn errors(&mut self) -> Vec<String> {
        self.eval("0");
        std::mem::take(&mut self.errors)
    }
}
