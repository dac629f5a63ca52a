//! Suggestions for misspelled words.

/// Returns the candidate that `word` most likely misspells. This is the nearest one within two
/// edits.
///
/// An edit inserts, deletes or replaces a character, or swaps two neighbors. The comparison ignores
/// case. A candidate that would be replaced completely is not suggested.
///
/// ```
/// use leasehold::store::kit::did_you_mean;
/// assert_eq!(did_you_mean("postgress", ["mysql", "postgres"]), Some("postgres"));
/// assert_eq!(did_you_mean("oracle", ["mysql", "postgres"]), None);
/// ```
pub fn did_you_mean<'a>(
    word: &str,
    candidates: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    let word = word.to_lowercase();
    let near = candidates.into_iter().filter_map(|candidate| {
        let edits = edits(&word, &candidate.to_lowercase());
        let shorter = word.chars().count().min(candidate.chars().count());
        (edits <= 2 && edits < shorter).then_some((edits, candidate))
    });
    near.min_by_key(|(edits, _)| *edits).map(|(_, candidate)| candidate)
}

/// Returns the number of edits between two words (optimal string alignment). A distance above two
/// may be returned as any number above two.
fn edits(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    if a.len().abs_diff(b.len()) > 2 {
        return usize::MAX;
    }
    // The last three rows of the table. `rows[2]` is the current one.
    let mut rows = [vec![0; b.len() + 1], vec![0; b.len() + 1], (0..=b.len()).collect::<Vec<_>>()];
    for i in 1..=a.len() {
        rows.rotate_left(1);
        rows[2][0] = i;
        for j in 1..=b.len() {
            let replaced = rows[1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut least = replaced.min(rows[1][j] + 1).min(rows[2][j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                least = least.min(rows[0][j - 2] + 1);
            }
            rows[2][j] = least;
        }
    }
    rows[2][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        for (a, b, n) in [
            ("", "", 0),
            ("", "ab", 2),
            ("pool", "poool", 1),
            ("redsi", "redis", 1),
            ("ca", "abc", 3),
            ("kitten", "sitting", 3),
            ("ключ", "клюв", 1),
        ] {
            assert_eq!((edits(a, b), edits(b, a)), (n, n), "{a} {b}");
        }
        assert_eq!(edits("a", "abcd"), usize::MAX);
    }

    #[test]
    fn only_similar_words_are_suggested() {
        let schemes = ["memory", "file", "postgres", "redis", "rediss", "s3", "gs", "etcd"];
        for (word, meant) in [
            ("postgress", Some("postgres")),
            ("Redis", Some("redis")),
            ("reds", Some("redis")),
            ("fiel", Some("file")),
            ("gcs", Some("gs")),
            ("a3", Some("s3")),
            ("x", None),
            ("", None),
            ("ftp", None),
            ("oracle", None),
        ] {
            assert_eq!(did_you_mean(word, schemes), meant, "{word}");
        }
    }

    proptest::proptest! {
        #![proptest_config(testbed::cases())]

        #[test]
        fn edit_distance_is_symmetric_and_zero_for_equal_words(a in "[ab]{0,4}", b in "[ab]{0,4}") {
            proptest::prop_assert_eq!(edits(&a, &b), edits(&b, &a));
            proptest::prop_assert_eq!(edits(&a, &a), 0);
        }
    }
}
