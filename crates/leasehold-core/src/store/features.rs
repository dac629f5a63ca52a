//! The hint that names the Cargo feature to enable.

/// Returns the hint for programs that use the library without this feature.
pub(crate) fn feature_hint(feature: &str) -> String {
    format!("enable the feature {feature:?} of leasehold: {ADD_FEATURE}{feature}")
}

const ADD_FEATURE: &str = "cargo add leasehold --features ";

/// Returns the feature that `hint` names, if [`feature_hint`] created it.
pub(crate) fn hinted_feature(hint: &str) -> Option<&str> {
    let (_, feature) = hint.split_once(ADD_FEATURE)?;
    (hint == feature_hint(feature)).then_some(feature)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn feature_name_is_extracted_from_its_hint() {
        assert_eq!(hinted_feature(&feature_hint("tls")), Some("tls"));
        assert_eq!(hinted_feature("cargo add leasehold --features tls"), None);
        assert_eq!(hinted_feature("retry"), None);
    }
}
