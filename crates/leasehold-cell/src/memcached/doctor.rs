//! Checks of a memcached server that stores locks. See [`leasehold_core::doctor`].

use std::collections::BTreeMap;
use std::time::Duration;

use leasehold_core::doctor::{Finding, clocks};
use leasehold_core::kit::short;

/// The server's statistics or settings, by name.
#[derive(Debug, Default)]
pub(super) struct Stats(BTreeMap<String, String>);

impl Stats {
    /// Parses the lines of a reply to `stats`.
    pub(super) fn of(lines: &[String]) -> Self {
        let pairs = lines.iter().filter_map(|line| line.strip_prefix("STAT ")?.split_once(' '));
        Self(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect())
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.get(name).map(String::as_str)
    }

    pub(super) fn number(&self, name: &str) -> Option<u64> {
        self.get(name)?.parse().ok()
    }
}

/// Judges the statistics and settings. They were read between `before` and `after` by our wall
/// clock, in µs. No lock is granted for `closed` after a restart.
pub(super) fn judge(
    stats: &Stats,
    settings: &Stats,
    (before, after): (u64, u64),
    closed: Duration,
) -> Vec<Finding> {
    let mut found: Vec<Finding> = evictions(stats, settings).into_iter().collect();
    found.extend(room(stats, settings));
    found.extend(restarts(stats, closed));
    if let Some(time) = stats.number("time") {
        // The server's time has whole seconds, so any time within this second is right.
        let second = 1_000_000;
        let theirs = time.saturating_mul(second);
        let within = before.clamp(theirs, theirs.saturating_add(second));
        found.extend(clocks(before, within, after));
    }
    found
}

/// The statistics that count evicted values.
const THROWN: [&str; 3] =
    ["evictions", "slab_reassign_evictions_nomem", "slab_reassign_busy_deletes"];

fn throws_away(settings: &Stats) -> bool {
    settings.get("evictions") != Some("off")
}

const EVICTED: &str = "a held lock can be evicted like any other value; another client then \
                       acquires it while the first still holds it";
const OWN_SERVER: &str = "use a separate server for locks with plenty of memory (-m), and start \
                          it with -M: a full server then returns an error, and clients grant no \
                          lock for a while";

fn evictions(stats: &Stats, settings: &Stats) -> Option<Finding> {
    let of = |name| stats.number(name).unwrap_or(0);
    // The page mover evicts values too, even if memory is not full and with -M.
    let thrown = THROWN.iter().map(|name| of(name)).fold(0, u64::saturating_add);
    if thrown > 0 {
        return Some(Finding::broken(
            "eviction",
            format!("the server has evicted {thrown} values since it started"),
            EVICTED,
            OWN_SERVER,
        ));
    }
    throws_away(settings).then(|| {
        Finding::weak(
            "eviction-possible",
            "the server evicts values when its memory is full",
            EVICTED,
            OWN_SERVER,
        )
    })
}

fn room(stats: &Stats, settings: &Stats) -> Option<Finding> {
    let (used, most) = (stats.number("bytes")?, stats.number("limit_maxbytes")?);
    (most > 0 && used > most / 5 * 4).then(|| {
        let why = match throws_away(settings) {
            true => {
                "a full server evicts the least recently used values, which can include held \
                 locks"
            }
            false => {
                "a full server rejects a write and discards the value that it would have replaced, \
                 and clients then grant no lock for a while"
            }
        };
        let what = format!("{used} of the server's {most} bytes are used");
        Finding::weak(
            "room",
            what,
            why,
            "start the server with more memory: `memcached -m MEGABYTES`",
        )
    })
}

fn restarts(stats: &Stats, closed: Duration) -> Option<Finding> {
    if closed.is_zero() {
        return Some(Finding::broken(
            "restart-delay",
            "restart_delay_ms is 0, so clients grant locks immediately after a server restart",
            "a restart loses held locks: two clients can hold the same lock until a lease \
             expires; new tokens rise with the clock",
            "remove restart_delay_ms from every client's URL",
        ));
    }
    let up = Duration::from_secs(stats.number("uptime")?);
    (up < closed).then(|| {
        Finding::note(
            "restarted",
            format!("the server started {} ago", short(up)),
            format!("it may have lost held locks, so no lock is granted for {}", short(closed)),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000_000_000;

    fn found(stats: &[(&str, &str)], settings: &[(&str, &str)], closed: u64) -> Vec<&'static str> {
        let stats_of = |pairs: &[(&str, &str)]| {
            Stats::of(&pairs.iter().map(|(k, v)| format!("STAT {k} {v}")).collect::<Vec<_>>())
        };
        let judged =
            judge(&stats_of(stats), &stats_of(settings), (NOW, NOW), Duration::from_secs(closed));
        judged.iter().map(|finding| finding.id).collect()
    }

    #[test]
    fn stats_lead_to_the_right_findings() {
        let kept = [("evictions", "off")];
        assert_eq!(found(&[], &kept, 20), [""; 0]);
        assert_eq!(found(&[("evictions", "3")], &[], 20), ["eviction"]);
        assert_eq!(found(&[("slab_reassign_busy_deletes", "1")], &kept, 20), ["eviction"]);
        assert_eq!(found(&[("slab_reassign_evictions_nomem", "1")], &kept, 20), ["eviction"]);
        assert_eq!(found(&[("evictions", "0")], &[("evictions", "on")], 20), ["eviction-possible"]);
        assert_eq!(found(&[("bytes", "90"), ("limit_maxbytes", "100")], &kept, 20), ["room"]);
        assert_eq!(found(&[("uptime", "5")], &kept, 20), ["restarted"]);
        assert_eq!(found(&[("uptime", "5")], &kept, 0), ["restart-delay"]);
        assert_eq!(found(&[("time", "1800000000")], &kept, 20), [""; 0]);
        assert_eq!(found(&[("time", "1800000009")], &kept, 20), ["clock-difference"]);
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn any_stats_are_judged_without_a_panic(
            line in testbed::texts(&["STAT evictions 3", "STAT uptime 5", "STAT time 1800000009", "STAT bytes 90"]),
            closed: u64,
        ) {
            let stats = Stats::of(&["STAT limit_maxbytes 100".to_owned(), line.clone()]);
            judge(&stats, &stats, (NOW, NOW), Duration::from_secs(closed));
            for (name, value) in stats.0.iter().filter(|(name, _)| *name != "limit_maxbytes") {
                proptest::prop_assert_eq!(format!("STAT {} {}", name, value), line.as_str());
            }
        }
    }
}
